"""The collector's configuration: defaults, a TOML file, command line flags; checked before a start."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moetrace_collectors.access.posture import check_posture
from moetrace_collectors.access.tls import TlsFiles
from moetrace_collectors.errors import UsageError
from moetrace_collectors.run_directory import RUNS_DIRECTORY, STORE_NAME
from moetrace_collectors.store import StoreAddress, embedded_dsn, parse_store
from moetrace_schemas.clickhouse.render import MigrationError, check_identifier

MIB = 2**20
JOINS = ("collector", "store")

_RANGES: dict[str, tuple[float, float]] = {
    "http_port": (0, 65_535),
    "grpc_port": (0, 65_535),
    "join_timeout_s": (0.01, 86_400),
    "join_watermark_steps": (0, 100_000),
    "join_quorum": (0.0, 1.0),
    "join_quorum_grace_s": (0.0, 86_400),
    "max_pending_steps": (1, 1_000_000),
    "max_pending_bytes": (MIB, 2**40),
    "max_closed_steps": (1, 10_000_000),
    "max_body_bytes": (1_024, 2**31 - 1),
    "max_decompressed_bytes": (1_024, 2**31 - 1),
    "max_spans_per_request": (1, 1_000_000),
    "max_connections": (1, 65_536),
    "client_requests_per_s": (0.0, 1_000_000),
    "client_request_burst": (1, 1_000_000),
    "queue_requests": (1, 1_000_000),
    "queue_bytes": (MIB, 2**40),
    "wal_max_bytes": (MIB, 2**50),
    "wal_segment_bytes": (64 * 1_024, 2**34),
    "max_world_size": (1, 2**20),
    "batch_bytes": (1_024, 2**34),
    "batch_interval_s": (0.0, 3_600),
    "shutdown_timeout_s": (0.1, 3_600),
    "dead_letter_bytes": (1_024, 2**40),
    "series_budget": (0, 1_000_000),
    "query_timeout_s": (0.1, 3_600),
    "query_max_memory_bytes": (MIB, 2**40),
    "query_max_result_rows": (1, 2**40),
    "query_max_result_bytes": (1_024, 2**40),
    "query_max_concurrent": (1, 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    """What a user can set; every field has a default. Names are those of the TOML file."""

    directory: Path = RUNS_DIRECTORY / "collector"
    """Run directory: the embedded store, the note of who owns it, the dead letter. Made if missing."""
    dsn: str = ""
    """Store: chdb:///path, clickhouse://user:password@host:port or https://...; empty: <directory>/store."""
    database: str = "moetrace"
    """Database of the tables; made and migrated at start."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback: with TLS and tokens or client certificates, or `insecure`."""
    http_port: int = 4318
    """OTLP/HTTP, metrics and queries; 0 = any free port."""
    grpc: bool = True
    """Whether to listen for OTLP/gRPC."""
    grpc_port: int = 4317
    """OTLP/gRPC; 0 = any free port."""
    insecure: bool = False
    """Listen beyond loopback without TLS or without tokens, on a network you trust."""
    join: str = "collector"
    """Who joins steps: `collector`, or `store` (this one only writes rank rows; see moetrace join)."""
    tls_certificate: str = ""
    """PEM file of the server's certificate and chain, for HTTP and gRPC; a renewed one is taken by itself."""
    tls_key: str = ""
    """PEM file of its key, without a password."""
    tls_client_ca: str = ""
    """PEM file of authorities; with it every client must show a certificate of theirs (mutual TLS)."""
    token_file: str = ""
    """File of tokens: NAME SCOPES TOKEN a line; scopes ingest, read, admin. Read again when changed."""
    token_variable: str = "MOETRACE_COLLECTOR_TOKENS"
    """Environment variable with more of them, in the same form; lines may be parted by semicolons."""
    open_metrics: bool = False
    """Whether /metrics needs no token; it shows run ids, ranks and expert loads."""
    join_timeout_s: float = 10.0
    """From a step's first rank until it is judged without the missing ones, seconds."""
    join_watermark_steps: int = 64
    """A step is judged early once each missing rank has sent so many later ones; 0 = never. Twice a batch."""
    join_quorum: float = 0.0
    """Share of the ranks, 0 to 1, that is enough after `join_quorum_grace_s`; 0 = wait for all of them."""
    join_quorum_grace_s: float = 2.0
    """From a step's first rank until `join_quorum` counts, seconds."""
    max_pending_steps: int = 1_024
    """Open steps at most; beyond it the oldest is closed early."""
    max_pending_bytes: int = 1_024 * MIB
    """Memory of open steps at most, bytes; beyond it the oldest are closed early."""
    max_closed_steps: int = 4_096
    """Closed steps remembered, to tell late and duplicate rank steps; stragglers of older ones are late."""
    max_body_bytes: int = 64 * MIB
    """Largest request as sent, bytes."""
    max_decompressed_bytes: int = 64 * MIB
    """Largest request after gzip, bytes."""
    max_spans_per_request: int = 10_000
    """Spans of one request."""
    max_connections: int = 1_024
    """HTTP connections at once; one more is told to come back."""
    client_requests_per_s: float = 1_000.0
    """Requests that one client address may make for good, per second; 0 = any number."""
    client_request_burst: int = 2_000
    """Requests that one client address may make at once."""
    queue_requests: int = 4_096
    """Requests in memory waiting for the join; beyond it they wait in the log, or senders come back."""
    queue_bytes: int = 512 * MIB
    """Memory of requests waiting for the join, bytes; beyond it as for `queue_requests`."""
    wal: bool = True
    """Write-ahead log: nothing is acknowledged before it is on disk. Off, a kill loses what is not stored."""
    wal_max_bytes: int = 8_192 * MIB
    """Disk space of the log, <directory>/wal, bytes; while the store is away it fills, then senders wait."""
    wal_segment_bytes: int = 64 * MIB
    """Size of the log's files, bytes; one is deleted once all that it holds is stored."""
    max_world_size: int = 65_536
    """Largest world size taken."""
    batch_bytes: int = 64 * MIB
    """Memory of joined steps that are written to the store together, bytes; while one batch is written,
    another may fill."""
    batch_interval_s: float = 0.5
    """Longest time a joined step waits to be written, seconds."""
    shutdown_timeout_s: float = 30.0
    """How long the last writes are retried when the collector stops, seconds."""
    dead_letter_bytes: int = 16 * MIB
    """Size of the dead letter file at which a new one is begun, bytes; one old file is kept."""
    series_budget: int = 20_000
    """Prometheus label sets of per-expert metrics at most."""
    query_timeout_s: float = 30.0
    """Longest query, seconds."""
    query_max_memory_bytes: int = 2_048 * MIB
    """Memory of one query, bytes."""
    query_max_result_rows: int = 1_000_000
    """Rows that one query may return."""
    query_max_result_bytes: int = 256 * MIB
    """Bytes that one query may return."""
    query_max_concurrent: int = 4
    """Queries at once."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: names the field, its value and what is expected.
        """
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(f"{name} = {value}: {low:g} to {high:g} expected")
        try:
            check_identifier("database", self.database)
        except MigrationError as error:
            raise UsageError(str(error)) from error
        if self.dsn:
            parse_store(self.dsn)
        if self.join not in JOINS:
            raise UsageError(f"join = {self.join!r}: {' or '.join(JOINS)} expected")
        if self.join_quorum and self.join_quorum_grace_s >= self.join_timeout_s:
            raise UsageError(
                f"join_quorum_grace_s = {self.join_quorum_grace_s:g}: less than join_timeout_s "
                f"({self.join_timeout_s:g}) expected, or join_quorum never counts"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise UsageError("tls_certificate and tls_key belong together: give both, or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise UsageError("tls_client_ca needs tls_certificate and tls_key")
        check_posture(
            host=self.host,
            tls=bool(self.tls_certificate),
            client_ca=bool(self.tls_client_ca),
            tokens=bool(self.token_file or self.environment_tokens),
            insecure=self.insecure,
        )

    @property
    def environment_tokens(self) -> str:
        """Tokens in the environment; not a field, so that none is ever shown with the configuration."""
        return os.environ.get(self.token_variable, "") if self.token_variable else ""

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of TLS; None where it is off."""
        if not self.tls_certificate:
            return None
        return TlsFiles(
            certificate=Path(self.tls_certificate),
            key=Path(self.tls_key),
            client_ca=Path(self.tls_client_ca) if self.tls_client_ca else None,
        )

    @property
    def store(self) -> StoreAddress:
        """Address of the store."""
        return parse_store(self.dsn or embedded_dsn(self.directory / STORE_NAME))


def load_config(path: Path | None, flags: Mapping[str, object]) -> CollectorConfig:
    """Defaults, then the file, then the flags that were given.

    Args:
        path: TOML file with fields of CollectorConfig at its top level; None for no file.
        flags: fields by name; None means that a flag was not given.

    Raises:
        UsageError: the file cannot be read, or a field is unknown or out of range.
    """
    values: dict[str, object] = {}
    if path is not None:
        values.update(_read_file(path))
    values.update({name: value for name, value in flags.items() if value is not None})
    known = {field.name for field in dataclasses.fields(CollectorConfig)}
    for name in values:
        if name not in known:
            raise UsageError(f"{path}: unknown option {name}; known are {', '.join(sorted(known))}")
    if isinstance(values.get("directory"), str):
        values["directory"] = Path(str(values["directory"]))
    # Checked field by field in __post_init__, which mypy cannot see through a mapping.
    return CollectorConfig(**values)  # type: ignore[arg-type]


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def _check_type(name: str, value: object, annotation: str) -> None:
    wanted = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "Path": (Path,),
    }[annotation]
    # True is an int to Python, and 4318.0 is no port.
    if not isinstance(value, wanted) or (isinstance(value, bool) and annotation != "bool"):
        raise UsageError(f"{name} = {value!r}: a value of type {annotation} expected")
