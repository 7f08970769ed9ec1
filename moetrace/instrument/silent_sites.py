"""Which wrapped call sites never fire, and why: judged in the drain thread, told once, kept for `coverage()`.

A site that is silent makes no error; its time is counted as `outside` and nobody notices. So the first
recorded step after instrumenting is compared with what should have fired, and what is missing is named
with the reason that the process shows evidence of.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moetrace.instrument.coverage import CoverageReport, SilentSite
from moetrace.instrument.patches import mark_of
from moetrace.record.sites import Site
from moetrace.record.types import StepRecord

logger = logging.getLogger("moetrace")
NAMED_PER_REASON = 3
"""Call sites that the warning names for each reason; `coverage()` has them all."""


class SilentReason(Enum):
    """Why a wrapped call site did not fire."""

    CAPTURED = "it ran while a device graph was captured; replays of the graph pass it by"
    REPLACED = "something else stands in its place since instrument(): call instrument() behind what did that"
    COMPILED = "it is compiled: torch.compile runs its code without the call"
    OTHER_THREAD = "its forward went on in another thread after the step had ended: put the step around it"
    WRONG_OBJECT = (
        "the instrumented model was not called in the step: another object ran (a copy, a replica, a model "
        "that was loaded later), or it ran outside the step or in another process"
    )
    OTHER_PATH = "its layer ran without calling it: a fused kernel, or another code path"
    LAYER_NOT_RUN = "its layer did not run in this step: another pipeline stage, an early exit, or layer drop"
    NOT_CALLED = "it was not called in the step: the callable that wrap() was given may run in its place"


@dataclass(slots=True)
class ForwardCalls:
    """What the wrapper of one model's forward has seen."""

    started: int = 0
    outlived: int = 0
    """Calls that ended after the step in which they had started."""


@dataclass(frozen=True, slots=True)
class PlacedSite:
    """Where a wrapper was put; `model` and `calls` are those of the model that it belongs to, if any."""

    owner: Any
    attribute: str
    model: Any = None
    calls: ForwardCalls | None = None


class CoverageWatch:
    """Compares every recorded step with what should have fired.

    What should is said by the user's thread, as whole new sets; all else is written by the drain thread.
    """

    def __init__(self) -> None:
        self.expected: frozenset[int] = frozenset()
        """Call sites that should fire in every step that begins now."""
        self.placed: Mapping[int, PlacedSite] = {}
        self.steps = 0
        """Recorded steps since the last change of what is expected."""
        self.silent: tuple[SilentSite, ...] = ()
        """As judged in the first of them, without those that have fired since."""
        self._judged: frozenset[int] = frozenset()
        """What was expected in those steps."""
        self._reason_of: dict[int, SilentSite] = {}

    def expect(self, expected: frozenset[int], placed: Mapping[int, PlacedSite]) -> None:
        """From the next step on, these sites should fire; they are placed there."""
        self.placed = placed
        self.expected = expected

    def report(
        self, installed: Iterable[CoverageReport], sites: Sequence[Site], graph_layers: int
    ) -> CoverageReport:
        """The reports of instrumented models as one, with what has fired so far and what has not."""
        reports = list(installed)
        expected = {sites[number].name for number in self.expected}
        told_apart: tuple[int, ...] = ()
        if graph_layers != 1:
            from moetrace.instrument import graphs

            told_apart = graphs.told_apart(sites, graph_layers)
        return CoverageReport(
            layers=tuple(layer for report in reports for layer in report.layers),
            skipped=tuple(dict.fromkeys(skip for report in reports for skip in report.skipped)),
            recorded_steps=self.steps,
            expected_sites=len(self.expected),
            silent=tuple(site for site in self.silent if site.name in expected),
            graph_layers=told_apart,
        )

    def note(self, record: StepRecord, sites: Sequence[Site]) -> None:
        """Take one record; warns once for each set of expected sites."""
        placed = self.placed
        if record.expected_sites != self._judged:
            self._judged, self.steps = record.expected_sites, 0
            self._reason_of = {}
        self.steps += 1
        if self.steps == 1:
            missing = sorted(record.expected_sites - record.seen_sites)
            fired = [sites[number] for number in record.seen_sites]
            self._reason_of = {
                number: _silent(number, sites[number], placed.get(number), record, fired)
                for number in missing
            }
            if missing:
                logger.warning(warning(record, self._reason_of.values()))
        elif self._reason_of:
            for number in record.seen_sites & self._reason_of.keys():
                del self._reason_of[number]
        self.silent = tuple(self._reason_of.values())


def warning(record: StepRecord, silent: Iterable[SilentSite]) -> str:
    """One line: how many sites are silent, and for each reason some of them."""
    by_reason: dict[str, list[str]] = {}
    for site in silent:
        by_reason.setdefault(site.reason, []).append(site.name)
    parts = []
    for reason, names in by_reason.items():
        more = len(names) - NAMED_PER_REASON
        named = ", ".join(names[:NAMED_PER_REASON]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"{named} ({reason})")
    count = sum(len(names) for names in by_reason.values())
    return (
        f"moetrace: {count} of {len(record.expected_sites)} wrapped call sites did not fire in step "
        f"{record.step}, the first that was recorded: {'; '.join(parts)}; their time counts as outside. "
        "coverage() of the tracer lists all of them"
    )


def _silent(
    number: int, site: Site, placed: PlacedSite | None, record: StepRecord, fired: Sequence[Site]
) -> SilentSite:
    reason = _reason(number, site, placed, record, fired)
    return SilentSite(name=site.name, layer=site.layer, code=reason.name.lower(), reason=_sentence(reason))


def _sentence(reason: SilentReason) -> str:
    sentence: str = reason.value
    if reason is not SilentReason.COMPILED:
        return sentence
    from moetrace.instrument import compiled

    return sentence if compiled.AVAILABLE else f"{sentence}, and {compiled.LIMITS[0][1]}"


def _reason(
    number: int, site: Site, placed: PlacedSite | None, record: StepRecord, fired: Sequence[Site]
) -> SilentReason:
    if number in record.unstamped_sites:
        return SilentReason.CAPTURED
    if placed is None:
        return SilentReason.NOT_CALLED
    if mark_of(vars(placed.owner).get(placed.attribute)) is None:
        return SilentReason.REPLACED
    if _is_compiled(placed):
        return SilentReason.COMPILED
    if placed.calls is not None and not placed.calls.started and fired and _anything_compiled():
        # Its forward was traced, and what did fire runs between the graphs (graph breaks) or inside them.
        return SilentReason.COMPILED
    if any(other.layer == site.layer for other in fired):
        return SilentReason.OTHER_PATH
    if placed.calls is None:
        return SilentReason.NOT_CALLED
    if placed.calls.outlived:
        return SilentReason.OTHER_THREAD
    if not placed.calls.started:
        return SilentReason.COMPILED if _anything_compiled() else SilentReason.WRONG_OBJECT
    if any(other.layer is not None for other in fired):
        return SilentReason.LAYER_NOT_RUN
    return SilentReason.COMPILED if _anything_compiled() else SilentReason.OTHER_PATH


def _is_compiled(placed: PlacedSite) -> bool:
    """Whether the owner, or a module around it, was compiled: in place, as a module, or its forward."""
    if getattr(placed.owner, "_compiled_call_impl", None) is not None:
        return True
    modules = getattr(placed.model, "named_modules", None)
    if modules is None:
        return False
    compiled = [m for _, m in modules() if _bears_compiled_code(m)]
    return any(placed.owner is inner for module in compiled for inner in module.modules())


def _bears_compiled_code(module: Any) -> bool:
    return (
        any(getattr(module, mark, None) is not None for mark in ("_compiled_call_impl", "_orig_mod"))
        # `module.forward = torch.compile(module.forward)`
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _anything_compiled() -> bool:
    """Whether torch.compile has traced anything in this process (`torch.compile(model)` does not mark it)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return bool(counters and counters["stats"].get("unique_graphs"))
