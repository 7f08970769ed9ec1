"""Everything that is said about one series of loads: experts, ranks, exchanges, time. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.coactivation import CoActivation, ExpertPair, cross_node_share, top_pairs
from moetrace_collectors.load.communication import Communication, activated_experts, communication_through
from moetrace_collectors.load.expert_map import Placement, contiguous_placement
from moetrace_collectors.load.figures import LoadFigures, load_figures
from moetrace_collectors.load.hot_spot_scan import HotSpotFinding, scan_hot_spots
from moetrace_collectors.load.hot_spot_settings import HotSpotRules
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.load.stability import Stability, split_windows, stability, window_edges
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.number_format import count

MEASURED, PLACEMENT, LEDGER = "measured", "placement", "ledger"
CONTIGUOUS, NONE = "contiguous", "none"
"""Where rank loads come from: rows that ranks counted, a given placement, the one that was announced, experts
in order, nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a user asks for."""

    num_ranks: int | None = None
    """Ranks of an expert-parallel group; None: as recorded."""
    num_nodes: int | None = None
    """Nodes of a group; None: as recorded, else 1."""
    windows: int = 8
    """Windows of consecutive steps for stability over time."""
    hot_experts: int = 8
    """Hot experts listed per layer."""
    seconds_per_step: float | None = None
    """For recordings that tell no time."""
    row_bytes: float | None = None
    """Size of one dispatched row, where exchanges were not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadWindow:
    """One window of consecutive entries."""

    first_step: int
    last_step: int
    start_s: float | None
    experts: LoadFigures
    """Arrays [L]."""
    hottest: IntArray
    """[L]: expert with the most."""
    rank_loads: FloatArray | None
    """[L, R]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadAnalysis:
    """One series, analysed. L layers, E experts, R ranks."""

    series: LoadSeries
    num_nodes: int
    rank_basis: str
    placement: Placement | None
    rank_loads: FloatArray | None
    """[S, L, R]; None where ranks are unknown."""
    experts: LoadFigures
    """Of the totals over entries; arrays [L]."""
    stability: Stability
    windows: tuple[LoadWindow, ...]
    communication: Communication | None
    activated: FloatArray | None
    """[L, R]: experts that a rank touches per step."""
    hot_spots: tuple[HotSpotFinding, ...] | None
    """None where no time is known."""
    coactivation: CoActivation | None
    coactivation_cross_node: FloatArray | None
    """[L]."""
    coactivated_pairs: tuple[ExpertPair, ...]
    warnings: tuple[str, ...]

    @property
    def compared(self) -> FloatArray:
        """[L, n]: what balance is judged on: rank loads, or expert loads where ranks are unknown."""
        return self.series.totals if self.rank_loads is None else self.rank_loads.sum(axis=0)


def analyse(
    series: LoadSeries,
    options: LoadOptions,
    rules: HotSpotRules,
    *,
    placement: Placement | None = None,
    coactivation: CoActivation | None = None,
) -> LoadAnalysis:
    """Analyse one series.

    Raises:
        UsageError: ranks, nodes, placement or co-activation do not fit the loads.
    """
    warnings = list(series.warnings)
    placement, basis = _placement(series, options, placement, warnings)
    num_ranks = placement.num_ranks if placement is not None else None
    num_nodes = _nodes(options.num_nodes or series.num_nodes, num_ranks, asked=options.num_nodes is not None)
    if basis == MEASURED:
        assert series.received is not None
        rank_loads: FloatArray | None = series.received
    else:
        rank_loads = placement.rank_loads(series.loads) if placement is not None else None
    _warn_about_loads(series, rank_loads, options, warnings)
    times = series.start_s
    if times is None and options.seconds_per_step is not None:
        times = (series.steps - series.steps[0]) * options.seconds_per_step
    timed = replace(series, start_s=times)
    if coactivation is not None and coactivation.within.shape[0] != len(series.layers):
        raise UsageError(
            f"routes tell {coactivation.within.shape[0]} layers, the loads have {len(series.layers)}: "
            "give routes of the same layers"
        )
    step_by_step = bool((series.steps_in_entry == 1).all())
    return LoadAnalysis(
        series=timed,
        num_nodes=num_nodes,
        rank_basis=basis,
        placement=placement,
        rank_loads=rank_loads,
        experts=load_figures(series.totals),
        stability=stability(split_windows(series.loads, options.windows), hot_set_size=options.hot_experts),
        windows=_windows(timed, rank_loads, options.windows),
        communication=_communication(series, placement, options),
        activated=activated_experts(series.loads, placement)
        if placement is not None and step_by_step
        else None,
        hot_spots=scan_hot_spots(timed, rank_loads, rules),
        coactivation=coactivation,
        coactivation_cross_node=(
            cross_node_share(coactivation, placement, num_nodes=num_nodes)
            if coactivation is not None and placement is not None
            else None
        ),
        coactivated_pairs=(
            top_pairs(coactivation, placement, num_nodes=num_nodes, count=16)
            if coactivation is not None and placement is not None
            else ()
        ),
        warnings=tuple(warnings),
    )


def fit_placement(
    placement: Placement, *, num_layers: int, num_experts: int, num_ranks: int | None
) -> Placement:
    """The placement for these loads; one of a single layer holds for all of them.

    Raises:
        UsageError: layers, experts or ranks do not fit.
    """
    if num_ranks is not None and num_ranks != placement.num_ranks:
        raise UsageError(
            f"placement is of {placement.num_ranks} ranks, asked for are {num_ranks}: give --ranks "
            f"{placement.num_ranks} or another placement"
        )
    if placement.num_experts != num_experts:
        raise UsageError(
            f"placement is of {placement.num_experts} experts, the loads have {num_experts}: give the "
            "placement that was in use"
        )
    if placement.num_layers not in (1, num_layers):
        raise UsageError(
            f"placement is of {placement.num_layers} layers, the loads have {num_layers}: give one row per "
            "layer, or one for all"
        )
    if placement.num_layers == num_layers:
        return placement
    return placement.select_layers(np.zeros(num_layers, dtype=np.int64))


def _placement(
    series: LoadSeries, options: LoadOptions, placement: Placement | None, warnings: list[str]
) -> tuple[Placement | None, str]:
    _, num_layers, num_experts = series.loads.shape
    if placement is not None:
        fitted = fit_placement(
            placement, num_layers=num_layers, num_experts=num_experts, num_ranks=options.num_ranks
        )
        return fitted, PLACEMENT
    announced = None if series.placement is None else series.placement.num_ranks
    num_ranks = options.num_ranks or series.num_ranks or announced
    if num_ranks is None:
        return None, NONE
    recorded = series.received is not None and num_ranks == series.num_ranks
    if series.placement is not None:
        if series.placement.num_ranks == num_ranks:
            warnings.append(
                f"experts are where version {series.placement_version} of the ledger has them (--placement "
                "for another mapping)"
            )
            return series.placement, MEASURED if recorded else LEDGER
        warnings.append(
            f"the ledger's mapping is of {series.placement.num_ranks} ranks, asked for are {num_ranks}: it "
            "is not used"
        )
    if num_experts % num_ranks:
        if recorded or options.num_ranks is None:
            warnings.append(
                f"{num_experts} experts do not divide by {num_ranks} ranks: give --placement for rank figures"
            )
            return None, NONE
        raise UsageError(
            f"ranks = {num_ranks} do not divide {num_experts} experts: give a divisor, or the placement "
            "in use with --placement"
        )
    contiguous = contiguous_placement(
        num_layers=num_layers, num_experts=num_experts, num_slots=num_experts, num_ranks=num_ranks
    )
    return contiguous, MEASURED if recorded else CONTIGUOUS


def _nodes(num_nodes: int | None, num_ranks: int | None, *, asked: bool) -> int:
    if num_nodes is None or num_ranks is None:
        return 1
    if num_nodes < 1 or num_ranks % num_nodes:
        if asked:
            raise UsageError(
                f"nodes = {num_nodes} do not divide ranks = {num_ranks}: every node has equally many ranks"
            )
        return 1
    return num_nodes


def _warn_about_loads(
    series: LoadSeries, rank_loads: FloatArray | None, options: LoadOptions, warnings: list[str]
) -> None:
    empty = [
        name
        for name, total in zip(series.layer_names, series.totals.sum(axis=1).tolist(), strict=True)
        if total == 0.0
    ]
    if empty:
        listed = ", ".join(empty[:8]) + (" ..." if len(empty) > 8 else "")
        warnings.append(f"no pairs in {count(len(empty), 'layer')} ({listed}): in no average")
    if rank_loads is None:
        warnings.append(
            "ranks are unknown, so balance is that of single experts: give --ranks or --placement"
        )
    if len(series.steps) == 1:
        warnings.append("one entry only: nothing can be said about stability over time")
    if series.start_s is None and options.seconds_per_step is None:
        warnings.append(
            "the recording tells no time, so hot spots are not looked for: give --seconds-per-step"
        )


def _windows(series: LoadSeries, rank_loads: FloatArray | None, count: int) -> tuple[LoadWindow, ...]:
    edges = window_edges(len(series.steps), max(1, min(count, len(series.steps)))).tolist()
    windows = []
    for low, high in pairwise(edges):
        loads = series.loads[low:high].sum(axis=0)
        windows.append(
            LoadWindow(
                first_step=int(series.steps[low]),
                last_step=int(series.steps[high - 1]),
                start_s=float(series.start_s[low]) if series.start_s is not None else None,
                experts=load_figures(loads),
                hottest=loads.argmax(axis=-1),
                rank_loads=rank_loads[low:high].sum(axis=0) if rank_loads is not None else None,
            )
        )
    return tuple(windows)


def _communication(
    series: LoadSeries, placement: Placement | None, options: LoadOptions
) -> Communication | None:
    if placement is None:
        return series.communication
    is_recorded = series.num_ranks == placement.num_ranks
    if series.communication is not None and is_recorded:
        return series.communication
    if series.source_counts is not None and is_recorded:
        return communication_through(series.source_counts, placement, row_bytes=options.row_bytes)
    return None
