"""RankTrace -> what each device row is part of: phase, direction, layer, collective. Pure.

Two ways, in this order:

1. Annotations. A kernel's correlation leads to the runtime call that launched it, and the moment of that
   call to the innermost annotation whose name is known (`annotation_names`) on any thread.
2. Names. A kernel that no known annotation holds is looked up in the table of `kernel_families`. That is
   the only way for kernels of a replayed graph, whose launch is one call for all of them.

Nothing else makes a phase: a trace without a known name has none.

Exchanges that do not tell their direction (NCCL send/recv) become dispatch or combine by what runs
around them, and stay plain communication where that is not a MoE layer::

    router  permute  <exchange>  expert_gemm  <exchange>  unpermute     attention  <exchange>  attention
                      dispatch                  combine                           communication
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.annotation_names import (
    COMMUNICATION,
    ENGINE_STEP,
    STEP,
    AnnotationMeaning,
    meaning_of,
)
from moetrace_collectors.offline.intervals import NONE, innermost_by_thread
from moetrace_collectors.offline.kernel_families import Family, Role, family_of
from moetrace_collectors.offline.layers import number_layers, settle_exchanges
from moetrace_collectors.offline.rank_trace import DeviceKind, RankTrace
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, Direction, Phase

BoolArray = npt.NDArray[np.bool_]

OTHER = -1
"""Device work that is part of no MoE phase."""
UNKNOWN_DIRECTION = -1

_EXCHANGE_PHASES = (PHASE_CODE[Phase.DISPATCH], PHASE_CODE[Phase.COMBINE])
_OUTSIDE = PHASE_CODE[Phase.OUTSIDE]
_FUSED = PHASE_CODE[Phase.FUSED]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePhases:
    """One entry per device row."""

    phase: IntArray
    """Wire code of Phase; -1 = none."""
    direction: IntArray
    """Wire code of Direction; -1 = not told."""
    layer: IntArray
    """MoE layer: as annotated, else the layer's place in its step; -1 outside MoE phases."""
    step: IntArray
    """Profiler step; 0 where the trace marks none, -1 outside all of the marked ones."""
    communicates: BoolArray
    """Collectives and exchanges, MoE phase or not."""
    kind: tuple[str, ...]
    """Kind of collective of each row; empty for local work."""
    steps: tuple[int, ...]
    """Steps that the trace marks, ascending; (0,) where it marks none."""

    @property
    def is_moe(self) -> BoolArray:
        """Rows that are part of a MoE phase."""
        found: BoolArray = self.phase != OTHER
        return found

    @property
    def is_exchange(self) -> BoolArray:
        """Rows that are a dispatch or combine on the wire."""
        found: BoolArray = self.communicates & np.isin(self.phase, _EXCHANGE_PHASES)
        return found


def recognise(trace: RankTrace) -> DevicePhases:
    """Phases of every device row of a trace."""
    device = trace.device
    count = len(device)
    moments, threads, launched = _launches(trace)
    families = [family_of(name) for name in trace.names]
    is_kernel = device.kind == DeviceKind.KERNEL
    annotated = _annotated(trace, moments, threads)

    phase = np.full(count, OTHER, dtype=np.int64)
    direction = np.full(count, UNKNOWN_DIRECTION, dtype=np.int64)
    layer = np.full(count, NONE, dtype=np.int64)
    has_meaning = annotated >= 0
    meanings = [meaning_of(name) for name in trace.names]
    settled = np.zeros(count, dtype=np.bool_)
    for name in np.unique(trace.annotations.name[annotated[has_meaning]]).tolist():
        meaning = meanings[name]
        if meaning is None:
            continue
        rows = has_meaning & (trace.annotations.name[np.maximum(annotated, 0)] == name)
        direction[rows] = DIRECTION_CODE[meaning.direction] if meaning.direction else UNKNOWN_DIRECTION
        layer[rows] = meaning.layer
        # Attention is named so that its kernels are not looked up by name; a whole layer, so that those
        # of its kernels that no row knows are not lost.
        phase[rows] = OTHER if meaning.phase is Phase.OUTSIDE else PHASE_CODE[meaning.phase]
        settled |= rows & (meaning.phase is not Phase.FUSED)

    communicates = _communicates(trace, families)
    by_name = is_kernel & ~settled
    table = np.array([_code(family) for family in families] or [OTHER], dtype=np.int64)
    named = np.where(by_name, table[device.name], OTHER) if count else phase
    phase = np.where(named != OTHER, named, phase)
    weak = np.array([bool(f and f.only_between) for f in families] or [False])
    phase = _drop_lone_general_kernels(phase, by_name & weak[device.name] if count else by_name)
    open_exchange = np.array(
        [f is not None and f.role is Role.EXCHANGE and f.phase is None for f in families] or [False]
    )
    if count:
        phase = settle_exchanges(device.start_ns, phase, by_name & open_exchange[device.name])
    step, steps = _steps(trace, moments, launched)
    layer = number_layers(
        device.start_ns,
        phase=phase,
        layer=np.where(phase == OTHER, NONE, layer),
        step=step,
        direction=direction,
    )
    return DevicePhases(
        phase=phase,
        direction=direction,
        layer=layer,
        step=step,
        communicates=communicates,
        kind=_kinds(trace, families, communicates, moments, threads),
        steps=steps,
    )


def _launches(trace: RankTrace) -> tuple[IntArray, IntArray, BoolArray]:
    """When and on which thread each device row was launched; its own start where that is not known."""
    device, launches = trace.device, trace.launches
    moments, threads = device.start_ns.copy(), np.full(len(device), NONE, dtype=np.int64)
    if not len(launches.correlation) or not len(device):
        return moments, threads, np.zeros(len(device), dtype=np.bool_)
    at = np.searchsorted(launches.correlation, device.correlation)
    at = np.minimum(at, len(launches.correlation) - 1)
    known = (launches.correlation[at] == device.correlation) & (device.correlation >= 0)
    moments[known] = launches.start_ns[at[known]]
    threads[known] = launches.thread[at[known]]
    return moments, threads, known


def _annotated(trace: RankTrace, moments: IntArray, threads: IntArray) -> IntArray:
    """Index of the innermost annotation with a known meaning around each row's launch; -1 = none."""
    marks = trace.annotations
    known = known_annotations(trace)
    if not len(known):
        return np.full(len(moments), NONE, dtype=np.int64)
    found = innermost_by_thread(
        marks.start_ns[known],
        marks.start_ns[known] + marks.duration_ns[known],
        marks.thread[known],
        moments,
        threads,
    )
    # A row whose launch is not known was given its own start, which no thread's annotation explains.
    found[threads == NONE] = NONE
    return np.where(found >= 0, known[np.maximum(found, 0)], NONE)


def known_annotations(trace: RankTrace) -> IntArray:
    """Indices of the annotations whose name is a phase (or names work outside of it)."""
    meanings: list[AnnotationMeaning | None] = [meaning_of(name) for name in trace.names]
    used = np.unique(trace.annotations.name)
    exchange_named = any(
        meaning is not None and meaning.phase in (Phase.DISPATCH, Phase.COMBINE)
        for meaning in (meanings[name] for name in used.tolist())
    )
    known = [m is not None and (exchange_named or not m.needs_exchange) for m in meanings]
    mask = np.array(known or [False])
    return np.flatnonzero(mask[trace.annotations.name]) if len(used) else np.zeros(0, dtype=np.int64)


def _code(family: Family | None) -> int:
    return OTHER if family is None or family.phase is None else PHASE_CODE[family.phase]


def _communicates(trace: RankTrace, families: list[Family | None]) -> BoolArray:
    device = trace.device
    by_name = np.array(
        [
            (f is not None and f.role is not Role.PHASE) or COMMUNICATION.match(name) is not None
            for f, name in zip(families, trace.names, strict=True)
        ]
        or [False]
    )
    if not len(device):
        return np.zeros(0, dtype=np.bool_)
    found: BoolArray = (device.kind == DeviceKind.KERNEL) & (by_name[device.name] | (device.detail >= 0))
    return found


def _drop_lone_general_kernels(phase: IntArray, weak: BoolArray) -> IntArray:
    """A general kernel (top-k, sort) counts only between two rows of MoE phases, few kernels apart."""
    if not weak.any():
        return phase
    strong = np.flatnonzero((phase != OTHER) & ~weak)
    kept = phase.copy()
    for index in np.flatnonzero(weak & (phase != OTHER)).tolist():
        after = int(np.searchsorted(strong, index))
        near = after < len(strong) and strong[after] - index <= 12
        before = after > 0 and index - strong[after - 1] <= 12
        # Sampling after the last layer has MoE rows before it and none right after it.
        if not (near and (before or kept[index] == PHASE_CODE[Phase.ROUTER])):
            kept[index] = OTHER
    return kept


def _steps(trace: RankTrace, moments: IntArray, launched: BoolArray) -> tuple[IntArray, tuple[int, ...]]:
    """Step of each row by the window its launch lies in."""
    marks = trace.annotations
    numbers = {index: int(m[1]) for index, name in enumerate(trace.names) if (m := STEP.match(name))}
    rows = [i for i, name in enumerate(marks.name.tolist()) if name in numbers]
    number = np.array([numbers[name] for name in marks.name[rows].tolist()], dtype=np.int64)
    if not rows:
        unnumbered = {index for index, name in enumerate(trace.names) if ENGINE_STEP.match(name)}
        rows = [i for i, name in enumerate(marks.name.tolist()) if name in unnumbered]
        number = np.arange(len(rows), dtype=np.int64)
        if len(rows) < 2:
            return np.zeros(len(moments), dtype=np.int64), (0,)
    starts = marks.start_ns[rows]
    ends = starts + marks.duration_ns[rows]
    at = np.searchsorted(starts, moments, side="right") - 1
    inside = (at >= 0) & (moments < ends[np.maximum(at, 0)])
    # Work that was launched in a step may run after its window; only a row without a launch is placed
    # by its own time, and late ones of those belong to the step before.
    loose = ~launched & (at >= 0)
    step = np.where(inside | loose, number[np.maximum(at, 0)], NONE)
    return step, tuple(sorted(set(number.tolist())))


def _kinds(
    trace: RankTrace,
    families: list[Family | None],
    communicates: BoolArray,
    moments: IntArray,
    threads: IntArray,
) -> tuple[str, ...]:
    """Kind of each collective: as the trace tells it, else by its group's mark, else by the kernel's name."""
    device, marks = trace.device, trace.annotations
    kinds = [""] * len(device)
    rows = np.flatnonzero(communicates)
    if not len(rows):
        return tuple(kinds)
    matches = [COMMUNICATION.match(name) for name in trace.names]
    marked = np.array([m is not None for m in matches])
    index = np.flatnonzero(marked[marks.name]) if len(marks) else np.zeros(0, dtype=np.int64)
    around = innermost_by_thread(
        marks.start_ns[index],
        marks.start_ns[index] + marks.duration_ns[index],
        marks.thread[index],
        moments[rows],
        threads[rows],
    )
    for row, inner in zip(rows.tolist(), around.tolist(), strict=True):
        detail = int(device.detail[row])
        family = families[int(device.name[row])]
        match = matches[int(marks.name[index[inner]])] if inner >= 0 and threads[row] != NONE else None
        if detail >= 0 and trace.collectives[detail].name:
            kinds[row] = normal_kind(trace.collectives[detail].name)
        elif match is not None:
            kinds[row] = normal_kind(match[1])
        elif family is not None and family.kind:
            kinds[row] = family.kind
        else:
            kinds[row] = "unknown"
    return tuple(kinds)


def normal_kind(name: str) -> str:
    """One name per kind of collective, however the writer spells it."""
    text = name.lower().replace("_base", "").replace("_coalesced", "").replace("_into_tensor", "")
    flat = "".join(character for character in text if character.isalpha())
    for known, kind in _KINDS.items():
        if known in flat:
            return kind
    return text.strip("_")[:40] or "unknown"


_KINDS = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send_recv",
}


def direction_of(code: int) -> Direction:
    """Direction of a code; forward where the trace does not say."""
    return Direction.BACKWARD if code == DIRECTION_CODE[Direction.BACKWARD] else Direction.FORWARD
