"""moetrace in the model process: import it, wrap any MoE model, and every step tells what made it slow.

::

    import moetrace

    moetrace.init(run_id="run-7", endpoint="http://collector:4318", sample="1/10")
    print(moetrace.instrument(model))
    for batch in loader:
        with moetrace.step():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
    moetrace.shutdown()

Nothing here ever syncs, blocks or raises into the model once `instrument` has returned.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moetrace import context as _context
from moetrace.config import Config
from moetrace.errors import ConfigError, MoetraceError, NotInitializedError, UnsupportedModelError
from moetrace.instrument.coverage import CoverageReport, LayerCoverage
from moetrace.instrument.hand_written import check_parts
from moetrace.tracer import Tracer
from moetrace_schemas.enums import ForwardMode, Phase

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from moetrace.emit.base import Emitter
    from moetrace.timing.clock import Clock

__all__ = [
    "Config",
    "ConfigError",
    "CoverageReport",
    "ForwardMode",
    "LayerCoverage",
    "MoetraceError",
    "NotInitializedError",
    "Phase",
    "Tracer",
    "UnsupportedModelError",
    "current_tracer",
    "init",
    "instrument",
    "phase",
    "placement",
    "shutdown",
    "step",
    "uninstrument",
    "wrap",
]

_tracer: Tracer | None = None


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    ep_rank: int | None = None,
    ep_size: int | None = None,
    ep_group: int | None = None,
    prometheus_registry: CollectorRegistry | None = None,
    emitters: list[Emitter] | None = None,
    clock: Clock | str | None = None,
    **settings: object,
) -> Tracer:
    """Start the tracer of this process; a running one is shut down first.

    Settings come from arguments, then `MOETRACE_*` environment variables, then defaults (see
    `Config`); ranks from arguments, then torch.distributed, then the launcher's RANK and WORLD_SIZE.

    Args:
        rank: global rank.
        world_size: number of ranks.
        ep_rank: rank in the expert-parallel group; adapters find it in the model where they can.
        ep_size: size of that group.
        ep_group: lowest global rank of that group.
        prometheus_registry: also expose this process's metrics there.
        emitters: replaces the configured emitters (tests, own sinks).
        clock: "auto", "host", "cuda", or an object of the Clock protocol.
        settings: fields of `Config`.

    Raises:
        ConfigError: a setting is wrong; the message names it and what is allowed.
    """
    global _tracer
    if isinstance(clock, str):
        settings["clock"] = clock
        clock = None
    config = Config.load(settings)
    if _tracer is not None:
        shutdown()
    ranks = _context.detect(
        run_id=config.run_id,
        rank=rank,
        world_size=world_size,
        ep_rank=ep_rank,
        ep_size=ep_size,
        ep_group=ep_group,
    )
    if not config.enabled:
        config = Config.load({**settings, "sample": "0"})
        emitters = []
    tracer = Tracer(config, ranks, [], clock)
    chosen = _emitters(tracer) if emitters is None else list(emitters)
    if prometheus_registry is not None:
        from moetrace.emit.prometheus import PrometheusEmitter

        chosen.append(PrometheusEmitter(prometheus_registry, tracer.metrics, tracer.guard))
    tracer.drain.emitters.extend(chosen)
    _tracer = tracer
    return tracer


def _emitters(tracer: Tracer) -> list[Emitter]:
    chosen: list[Emitter] = []
    # The file first: where it cannot be written, no thread has been started yet.
    if tracer.config.jsonl_dir:
        from moetrace.emit.jsonl import JsonlEmitter

        try:
            chosen.append(JsonlEmitter(tracer.config.jsonl_dir, lambda: tracer.context, tracer.metrics))
        except OSError as error:
            raise ConfigError(
                f"jsonl_dir={tracer.config.jsonl_dir!r}: cannot be written ({error})"
            ) from error
    if tracer.config.endpoint:
        from moetrace.emit.otlp import OtlpEmitter
        from moetrace.emit.spool import open_spool

        try:
            spool = open_spool(tracer.config, tracer.context, tracer.metrics)
        except OSError as error:
            raise ConfigError(
                f"spool_dir={tracer.config.spool_dir!r}: cannot be written ({error})"
            ) from error
        chosen.append(OtlpEmitter(lambda: tracer, tracer.metrics, tracer.config, spool=spool))
    return chosen


def current_tracer() -> Tracer:
    """The running tracer.

    Raises:
        NotInitializedError: `init` was not called, or `shutdown` was.
    """
    if _tracer is None:
        raise NotInitializedError("moetrace is not running; call moetrace.init() first")
    return _tracer


def _recording() -> Tracer | None:
    return _tracer if _tracer is not None and _tracer.config.enabled else None


def instrument(model: Any, *, strict: bool = False) -> CoverageReport:
    """Wrap the MoE layers of a model in place; starts a tracer from the environment if none runs.

    Without an open `step`, each forward of `model` is a step of its own.

    Args:
        model: a torch module that holds MoE layers of a known framework.
        strict: raise where no MoE layer is found, instead of returning an empty report.

    Returns:
        What is covered, phase by phase, what is not, and why. False where nothing was found.

    Raises:
        UnsupportedModelError: no MoE layer was found and `strict` is set.
        ConfigError: no tracer runs and the environment's settings are wrong.
    """
    tracer = _tracer or init()
    if not tracer.config.enabled:
        return CoverageReport(skipped=(("model", "tracing is off (enabled=False)"),))
    return tracer.instrument(model, strict=strict)


def uninstrument(model: Any | None = None) -> None:
    """Put the very same callables back, of one model or of all."""
    if _tracer is not None:
        _tracer.uninstrument(model)


def step(
    step: int | None = None,
    *,
    forward_mode: ForwardMode | str | None = None,
    microbatch: int = 0,
    cohort: str = "",
    warmup: bool | None = None,
    dummy: bool = False,
) -> contextlib.AbstractContextManager[object]:
    """One step as a context manager; see `Tracer.step`. A no-op where no tracer runs."""
    tracer = _recording()
    if tracer is None:
        return contextlib.nullcontext()
    return tracer.step(
        step,
        forward_mode=forward_mode,
        microbatch=microbatch,
        cohort=cohort,
        warmup=warmup,
        dummy=dummy,
    )


def phase(phase: Phase | str, *, layer: int | None = None) -> contextlib.AbstractContextManager[None]:
    """One phase of hand-written code; see `Tracer.phase`. A no-op where no tracer runs."""
    tracer = _recording()
    return contextlib.nullcontext() if tracer is None else tracer.phase(phase, layer=layer)


def placement(
    version: int,
    physical_to_logical: object = None,
    *,
    layers: Sequence[int] | None = None,
    num_experts: int | None = None,
    ranks: int | None = None,
    **terms: Any,
) -> None:
    """The expert placement in force from the next step on; see `Tracer.placement`. A no-op without a tracer.

    Raises:
        ConfigError: a version, map or term that cannot be.
    """
    tracer = _recording()
    if tracer is not None:
        tracer.placement(
            version, physical_to_logical, layers=layers, num_experts=num_experts, ranks=ranks, **terms
        )


def wrap(
    *, layer: int | None = None, num_experts: int | None = None, **callables: Callable[..., Any]
) -> SimpleNamespace:
    """Wrap hand-written MoE code; see `Tracer.wrap`. Returns the callables untouched where no tracer runs.

    Raises:
        ConfigError: an unknown name, a value that is not callable, or a number out of range.
    """
    tracer = _recording()
    if tracer is None:
        check_parts(callables, layer, num_experts)
        return SimpleNamespace(**callables)
    return tracer.wrap(layer=layer, num_experts=num_experts, **callables)


def shutdown(timeout_s: float | None = None) -> bool:
    """Stop the tracer, send what is recorded, restore every callable; returns within the deadline.

    Returns:
        True when everything was delivered.
    """
    global _tracer
    tracer, _tracer = _tracer, None
    return True if tracer is None else tracer.shutdown(timeout_s)


atexit.register(shutdown)
