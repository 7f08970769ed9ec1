"""The loads that are analysed: one forward mode, one cohort or all of them, in order of steps. Pure.

Prefill and decode are never one series. An entry is one step, or several consecutive ones where a recording
is too long to be held step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.counted_steps import CountedSteps
from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.arrays import as_loads
from moetrace_collectors.load.coactivation import CoActivation
from moetrace_collectors.load.communication import Communication
from moetrace_collectors.load.expert_map import Placement
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.number_format import count
from moetrace_collectors.offline.load_recording import LoadRecording
from moetrace_schemas.enums import ForwardMode

MAX_CELLS = 1 << 24
"""Entries x layers x experts that are analysed (128 MiB of float64); a longer series is summed over steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmSamples:
    """Experts' times of single (step, layer, rank) with the rows that they worked on; arrays [n]."""

    rows: FloatArray
    microseconds: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadSeries:
    """Loads [S, L, E] of one forward mode and cohort, and what else was recorded beside them."""

    source: str
    forward_mode: ForwardMode | None
    """None where the recording does not tell."""
    cohort: str | None
    """None: all cohorts together."""
    steps: IntArray
    """[S]: first step of each entry."""
    steps_in_entry: IntArray
    """[S]: steps summed in each entry."""
    layers: IntArray
    """[L]: as the model numbers its blocks."""
    layer_names: tuple[str, ...]
    loads: FloatArray
    """[S, L, E]: (token, slot) pairs per logical expert, summed over the ranks of all groups."""
    top_k: int | None = None
    start_s: FloatArray | None = None
    """[S]: unix time of each entry's first step, seconds."""
    num_ranks: int | None = None
    """Ranks of an expert-parallel group, where recorded."""
    num_groups: int = 1
    """Expert-parallel groups that the counts are summed over."""
    num_nodes: int | None = None
    """Nodes of a group, where recorded."""
    received: FloatArray | None = None
    """[S, L, R]: rows that each rank's experts received, where recorded."""
    received_remote: FloatArray | None = None
    """[S, L, R]: of those, rows from other ranks, where exchanges were recorded."""
    communication: Communication | None = None
    """Recorded exchanges, summed over entries."""
    source_counts: FloatArray | None = None
    """[L, R, E]: pairs by the rank that routed them, where recorded."""
    gemm: GemmSamples | None = None
    step_ms: float | None = None
    """Median length of a step, where recorded."""
    coactivation: CoActivation | None = None
    """Pairs of experts, where ranks sampled them."""
    placement_version: int | None = None
    """Placement epoch of all steps; 0: nobody told one, None: a dump, which does not tell."""
    placement: Placement | None = None
    """The mapping in force, where it was announced."""
    expert_bytes: int | None = None
    """Weights of one expert of one layer, where announced."""
    last_step: int | None = None
    """Last step of the last entry, where it holds several."""
    warmup_told: bool = False
    """Whether warm-up steps are told from others, and left out; a dump does not tell."""
    warnings: tuple[str, ...] = ()

    @property
    def counted(self) -> CountedSteps:
        """Which steps all figures are of."""
        return CountedSteps(
            first=int(self.steps[0]),
            last=int(self.steps[-1]) if self.last_step is None else self.last_step,
            counted=int(self.steps_in_entry.sum()),
            kind=str(self.forward_mode or ""),
            warmup_told=self.warmup_told,
        )

    @property
    def name(self) -> str:
        """Forward mode and cohort, for people."""
        mode = self.forward_mode.value if self.forward_mode else "all steps"
        return mode if self.cohort is None else f"{mode}, cohort {self.cohort}"

    @property
    def totals(self) -> FloatArray:
        """[L, E]: loads summed over entries."""
        summed: FloatArray = self.loads.sum(axis=0)
        return summed

    @property
    def pairs(self) -> float:
        """All (token, slot) pairs."""
        return float(self.loads.sum())


def series_of_recording(recording: LoadRecording) -> tuple[LoadSeries, ...]:
    """One series per forward mode of a dump, the one with most pairs first.

    Raises:
        UsageError: nothing was counted.
    """
    name = recording.source.partition("#")[2] or None
    modes = sorted(set(recording.forward_modes), key=lambda mode: str(mode or ""))
    found = []
    for mode in modes:
        chosen = np.array([told is mode for told in recording.forward_modes])
        edges = _entry_edges(int(chosen.sum()), recording.counts.shape[1] * recording.counts.shape[2])
        loads = np.add.reduceat(recording.counts[chosen].astype(np.float64), edges[:-1], axis=0)
        warnings = list(recording.warnings)
        if len(loads) < chosen.sum():
            warnings.append(
                f"{int(chosen.sum())} steps are summed to {count(len(loads), 'entry', 'entries')}; step "
                "figures are of entries"
            )
        found.append(
            LoadSeries(
                source=recording.source,
                forward_mode=mode,
                cohort=name,
                steps=recording.steps[chosen][edges[:-1]],
                steps_in_entry=np.diff(edges),
                last_step=int(recording.steps[chosen][-1]),
                layers=recording.layers,
                layer_names=recording.layer_names,
                loads=as_loads(loads, name=recording.source),
                top_k=recording.top_k,
                warnings=tuple(warnings),
            )
        )
    return in_order(found, source=recording.source)


def in_order(found: Iterable[LoadSeries], *, source: str) -> tuple[LoadSeries, ...]:
    """Series with any pair: all cohorts before single ones, then by falling pairs.

    Raises:
        UsageError: no series has any.
    """
    used = [series for series in found if series.pairs > 0.0]
    if not used:
        raise UsageError(
            f"{source}: every count is 0, so there is no load to look at: record steps with tokens"
        )
    return tuple(sorted(used, key=lambda series: (series.cohort is not None, -series.pairs)))


def choose_series(
    found: Sequence[LoadSeries], *, forward_mode: ForwardMode | None = None, cohort: str | None = None
) -> LoadSeries:
    """The series asked for; the first where nothing is asked.

    Raises:
        UsageError: there is none; lists those there are.
    """
    for series in found:
        if (forward_mode is None or series.forward_mode is forward_mode) and (
            cohort is None or series.cohort == cohort
        ):
            return series
    asked = " ".join(
        [f"--forward-mode {forward_mode}"] * (forward_mode is not None)
        + [f"--cohort {cohort}"] * (cohort is not None)
    )
    listed = "; ".join(series.name for series in found[:12])
    raise UsageError(f"{asked}: no such load in {found[0].source}, which holds {listed}")


def _entry_edges(steps: int, cells_per_step: int) -> IntArray:
    """[entries + 1]: as many entries as fit, evenly."""
    entries = max(1, min(steps, MAX_CELLS // max(cells_per_step, 1)))
    return np.arange(entries + 1, dtype=np.int64) * steps // entries
