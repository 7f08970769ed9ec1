"""Settings of the tracer: defaults, environment, validation. The only module that reads `MOETRACE_*`.

Order: argument of `init` > environment variable > default.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from moetrace.errors import ConfigError
from moetrace_schemas.enums import ForwardMode
from moetrace_schemas.identity import RUN_ID_PATTERN

ENVIRONMENT_PREFIX = "MOETRACE_"
LOWEST = {
    "buffers": 1,
    "max_intervals": 16,
    "queue_steps": 1,
    "warmup_steps": 0,
    "check_steps": 0,
    "graph_layers": 1,
    "coactivation_steps": 0,
    "coactivation_layers": 1,
    "spool_max_bytes": 2**20,
}
"""Smallest values of whole numbers."""
MOST_INTERVALS = 32_767
"""An interval makes at most two rows, and the wire numbers rows of one kind with a uint16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a user may set. Every field is also an environment variable `MOETRACE_<FIELD>`."""

    enabled: bool = True
    """False: every call is a no-op and nothing is wrapped."""
    run_id: str = ""
    """The same on all ranks. Empty: the launcher's id (TORCHELASTIC_RUN_ID, SLURM_JOB_ID) if any."""
    endpoint: str = "http://127.0.0.1:4318"
    """Base URL of the collector's OTLP/HTTP receiver; empty sends nothing."""
    headers: str = field(default="", repr=False)
    """Extra HTTP headers, `name=value,name=value`."""
    token_file: str = ""
    """File with the bearer token for the collector, read again when it changes (rotation)."""
    ca_file: str = ""
    """PEM file of the authority of the collector's certificate; empty: those that the system trusts."""
    client_certificate: str = ""
    """PEM file of this process's certificate, for a collector that asks for one."""
    client_key: str = ""
    """PEM file of its key; empty where the certificate's file holds it."""
    sample: str = "1/1"
    """`1/N`: one step in N, by hash of run and step, the same steps on all ranks. `0` samples nothing."""
    forward_mode: ForwardMode | str = ""
    """Forward mode of steps that do not say one; empty: as the engine, or the model's own call, shows it."""
    model_name: str = ""
    """Model name; empty: the class name of the instrumented model."""
    model_version: str = ""
    """Model version or revision."""
    cohorts: tuple[str, ...] = ()
    """Allow-list of traffic cohorts; a step with another cohort is recorded with an empty one."""
    clock: str = "auto"
    """`auto` (events of the device that the model is on), `host`, `cuda`, or `device`: torch.Event."""
    backward: bool = True
    """Whether backward is recorded by phase, from hooks at autograd boundaries; False: it is `outside`."""
    compiled: bool = True
    """Whether graphs of torch.compile hold marks and counts; False: nothing is recorded inside of them."""
    jsonl_dir: str = ""
    """Directory for one JSONL file per rank; empty writes none."""
    warmup_steps: int = 0
    """The first steps of this process are marked as warm-up: kept, but left out of summaries."""
    buffers: int = 8
    """Step buffers; a sampled step is dropped (and counted) when all are in use."""
    max_intervals: int = 4096
    """Intervals that one step may record; a step with more is dropped (and counted)."""
    check_steps: int = 20
    """Every so many recorded steps, and in the first, routing is checked (duplicates, weights, what experts
    were called with); 0 never."""
    check_graphs: bool = False
    """Whether graphs that are captured hold the checks of routing too: they then run in every replay,
    recorded or not (a sort of the ids and sums of the weights per layer), and are told in checked steps."""
    graph_layers: int = 1
    """Every n-th MoE layer is told apart by phase in captured graphs, so that these hold fewer events; the
    others show as `fused`. `coverage()` names the layers."""
    coactivation_steps: int = 0
    """Every so many recorded steps, and in the first, pairs of experts that serve the same token are counted;
    0 never."""
    coactivation_layers: int = 4
    """Layers that are counted at once, the next ones in the next such step. Each needs 8 bytes x E x E; all
    together 64 MiB at the most."""
    wait_stats: bool = False
    """DeepEP's low-latency kernels are given tensors to sum their waits per rank in, where the caller gave
    them none."""
    kernels: bool = False
    """Wrapped calls can name their kernels to CUPTI, for `Tracer.kernels`."""
    nvtx: bool = False
    """NVTX ranges around wrapped calls, in every step."""
    queue_steps: int = 256
    """Steps that may wait for the exporter; the oldest is dropped (and counted) beyond it."""
    spool_dir: str = ""
    """Directory for steps that the collector does not take now, sent when it is back; empty: none."""
    spool_max_bytes: int = 256 * 2**20
    """Disk space of this rank's spool, bytes; the oldest steps give way (and are counted) beyond it."""
    export_timeout_s: float = 5.0
    """Longest single export call, seconds."""
    shutdown_timeout_s: float = 5.0
    """Deadline of the shutdown at interpreter exit, seconds."""

    def __post_init__(self) -> None:
        if self.run_id and not RUN_ID_PATTERN.fullmatch(self.run_id):
            raise ConfigError(f"run_id={self.run_id!r}: 1 to 128 characters of A-Z a-z 0-9 . _ : - expected")
        if self.endpoint:
            url = urlsplit(self.endpoint)
            if url.scheme not in ("http", "https") or not url.netloc:
                raise ConfigError(f"endpoint={self.endpoint!r}: a URL like http://127.0.0.1:4318 expected")
        if self.clock not in ("auto", "host", "cuda", "device"):
            raise ConfigError(f"clock={self.clock!r}: one of auto, host, cuda, device expected")
        for name, low in LOWEST.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}: {low} or more expected")
        if self.max_intervals > MOST_INTERVALS:
            raise ConfigError(f"max_intervals={self.max_intervals}: {MOST_INTERVALS} or less expected")
        for name in ("token_file", "ca_file", "client_certificate", "client_key"):
            path = getattr(self, name)
            if path and not os.path.isfile(path):
                raise ConfigError(f"{name}={path!r}: no such file")
        if self.client_key and not self.client_certificate:
            raise ConfigError("client_key needs client_certificate")
        for name in ("export_timeout_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ConfigError(f"{name}={getattr(self, name)}: seconds between 0 and 3600 expected")
        _ = self.sample_period
        _ = self.header_map

    @property
    def sample_period(self) -> int:
        """N of `1/N`; 0 samples nothing.

        Raises:
            ConfigError: not `0`, `1` or `1/N`.
        """
        numerator, _, denominator = self.sample.strip().partition("/")
        try:
            if not denominator:
                period = int(numerator)
                if period in (0, 1):
                    return period
            elif int(numerator) == 1 and int(denominator) >= 1:
                return int(denominator)
        except ValueError:
            pass
        raise ConfigError(f"sample={self.sample!r}: 1/N with N of 1 or more expected, or 0 for none")

    @property
    def header_map(self) -> dict[str, str]:
        """`headers` as a mapping.

        Raises:
            ConfigError: an entry without `=`.
        """
        result = {}
        for number, entry in enumerate(filter(None, (part.strip() for part in self.headers.split(","))), 1):
            name, separator, value = entry.partition("=")
            if not separator or not name.strip():
                # Not the value: it may hold a token, and errors are logged.
                raise ConfigError(
                    f"headers: entry {number} is not name=value; name=value,name=value expected"
                )
            result[name.strip()] = value.strip()
        return result

    @classmethod
    def load(cls, arguments: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Config:
        """Arguments over environment over defaults; arguments that are None are not given.

        Raises:
            ConfigError: an unknown argument, or a value that does not parse.
        """
        environment = os.environ if environment is None else environment
        known = {field.name: field for field in fields(cls)}
        for name in arguments:
            if name not in known:
                raise ConfigError(f"{name}: no such setting; known: {', '.join(sorted(known))}")
        values: dict[str, object] = {}
        for name in known:
            text = environment.get(ENVIRONMENT_PREFIX + name.upper())
            if arguments.get(name) is not None:
                values[name] = _parse_argument(name, arguments[name])
            elif text is not None:
                values[name] = _parse_text(ENVIRONMENT_PREFIX + name.upper(), name, text)
        return cls(**values)  # type: ignore[arg-type]


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _parse_argument(name: str, value: object) -> object:
    if name == "forward_mode":
        return _parse_text(name, name, str(value))
    if name == "cohorts":
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigError(f"cohorts={value!r}: a sequence of strings expected")
        cohorts = tuple(value)
        if not all(isinstance(item, str) for item in cohorts):
            raise ConfigError(f"cohorts={value!r}: a sequence of strings expected")
        return cohorts
    if name == "sample" and isinstance(value, int):
        return str(value)
    expected = type(getattr(Config(), name))
    if expected is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise ConfigError(f"{name}={value!r}: {expected.__name__} expected")
    return value


def _parse_text(label: str, name: str, text: str) -> object:
    default = getattr(Config(), name)
    try:
        if isinstance(default, bool):
            return _BOOLEANS[text.strip().lower()]
        if name == "forward_mode":
            return ForwardMode(text.strip().lower()) if text.strip() else ""
        if isinstance(default, tuple):
            return tuple(filter(None, (part.strip() for part in text.split(","))))
        return type(default)(text)
    except (ValueError, KeyError):
        if name == "forward_mode":
            allowed = "one of " + ", ".join(ForwardMode)
        elif isinstance(default, bool):
            allowed = "true or false"
        else:
            allowed = type(default).__name__
        raise ConfigError(f"{label}={text!r}: {allowed} expected") from None
