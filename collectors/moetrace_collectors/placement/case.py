"""From what was asked and what was recorded to a case to replay; says what had to be assumed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.analysis import fit_placement
from moetrace_collectors.load.coactivation import CoActivation
from moetrace_collectors.load.expert_map import Placement, check_slots, contiguous_placement
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.placement.memory import EXPERT_BYTES, MemoryBudget
from moetrace_collectors.placement.replay import ReplayCase
from moetrace_collectors.placement.step_cost import (
    MICROSECONDS_PER_ROW,
    ROW_BYTES,
    Basis,
    Copies,
    GemmTime,
    StepCost,
    fit_gemm,
)
from moetrace_collectors.placement.topology import LINK_GB_PER_S, NODE_GB_PER_S, Topology
from moetrace_schemas.enums import ForwardMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What a user asks for; None is: as recorded, else a typical value that is named as assumed."""

    num_slots: int | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    num_groups: int = 1
    top_k: int | None = None
    us_per_row: float | None = None
    row_bytes: float | None = None
    node_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    copies: str = Copies.NODE.value
    expert_mb: float | None = None
    memory_gb: float | None = None
    """Of the rank with the least."""
    memory_ranks: int = 0
    """Ranks that memory was told for; 0 or 1: one figure for all."""
    reserved_gb: float = 0.0
    max_moves: int | None = None
    windows: int = 2
    horizon_s: float = 3600.0
    min_gain: float = 0.01
    plan_seconds: float = 1.0


def make_case(
    series: LoadSeries,
    request: ReplayRequest,
    *,
    today: Placement | None = None,
    coactivation: CoActivation | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[ReplayCase, list[str], list[str]]:
    """The case, what was assumed, and warnings.

    Raises:
        UsageError: ranks are unknown, or slots, nodes, groups, memory or co-activation do not fit.
    """
    _, num_layers, num_experts = series.loads.shape
    assumptions: list[str] = []
    warnings = list(series.warnings)
    known = today or series.placement
    num_ranks = request.num_ranks or (known.num_ranks if known is not None else series.num_ranks)
    if num_ranks is None:
        raise UsageError("the recording does not tell its ranks: give --ranks")
    if request.memory_ranks > 1 and request.memory_ranks != num_ranks:
        raise UsageError(
            f"memory-gb tells {request.memory_ranks} ranks, there are {num_ranks}: give one or {num_ranks}"
        )
    if today is None:
        today = _announced(series, num_ranks, assumptions, warnings)
    if coactivation is None and series.coactivation is not None and request.copies != Copies.PAIR:
        coactivation = series.coactivation
        assumptions.append("experts share tokens as the ranks' samples of this run say (else give --routes)")
    num_slots = request.num_slots or (today.num_slots if today is not None else num_experts)
    check_slots(num_slots=num_slots, num_experts=num_experts, num_ranks=num_ranks)
    if today is not None:
        today = fit_placement(today, num_layers=num_layers, num_experts=num_experts, num_ranks=num_ranks)
    else:
        slots_today = num_experts if num_experts % num_ranks == 0 else num_slots
        today = contiguous_placement(
            num_layers=num_layers, num_experts=num_experts, num_slots=slots_today, num_ranks=num_ranks
        )
        assumptions.append(
            "today each rank holds the experts in order of their number (else tell it with --placement)"
        )
    if request.max_moves is not None and today.slots_per_rank > num_slots // num_ranks:
        raise UsageError(
            f"slots = {num_slots} are fewer than the {today.num_slots} in use: with --max-moves give as "
            "many, or more"
        )
    if coactivation is not None and coactivation.within.shape[0] != num_layers:
        raise UsageError(
            f"routes tell {coactivation.within.shape[0]} layers, the loads have {num_layers}: give routes of "
            "the same layers"
        )
    topology = _topology(series, request, num_ranks, assumptions)
    cost = _cost(series, request, topology, assumptions, warnings)
    announced_bytes = None
    if request.expert_mb is None and series.expert_bytes is not None:
        announced_bytes = float(series.expert_bytes)
        assumptions.append(
            f"an expert of a layer weighs {announced_bytes / 1e6:.4g} MB, as the ledger says (--expert-mb)"
        )
    expert_bytes = _or_assumed(
        announced_bytes if request.expert_mb is None else request.expert_mb * 1e6,
        EXPERT_BYTES,
        f"an expert of a layer weighs {EXPERT_BYTES / 1e6:.0f} MB (--expert-mb)",
        assumptions,
    )
    memory = MemoryBudget(
        memory_gb=request.memory_gb,
        reserved_gb=request.reserved_gb,
        expert_bytes=expert_bytes,
        num_layers=num_layers,
    )
    memory.check(num_slots=num_slots, num_ranks=num_ranks, num_experts=num_experts)
    if len(series.loads) == 1:
        warnings.append("one entry only: in-sample figures, no held-out ones")
    case = ReplayCase(
        series=series,
        num_slots=num_slots,
        cost=cost,
        memory=memory,
        today=today,
        num_groups=request.num_groups,
        coactivation=coactivation,
        max_moves=request.max_moves,
        windows=request.windows,
        horizon_s=request.horizon_s,
        min_gain=request.min_gain,
        plan_seconds=request.plan_seconds,
        clock=clock,
    )
    case.problem(series.loads)  # groups are checked before anything is planned
    return case, assumptions, warnings


def _announced(
    series: LoadSeries, num_ranks: int, assumptions: list[str], warnings: list[str]
) -> Placement | None:
    """The mapping in force, where it was announced and is of as many ranks."""
    told = series.placement
    if told is None:
        return None
    if told.num_ranks != num_ranks:
        warnings.append(
            f"the ledger's mapping is of {told.num_ranks} ranks, asked for are {num_ranks}: it is not used"
        )
        return None
    assumptions.append(
        f"today's placement is version {series.placement_version} of the ledger (else tell it with "
        "--placement)"
    )
    return told


def _topology(series: LoadSeries, request: ReplayRequest, num_ranks: int, assumptions: list[str]) -> Topology:
    num_nodes = request.num_nodes
    if num_nodes is None:
        recorded = series.num_nodes if series.num_ranks == num_ranks else None
        num_nodes = recorded or 1
        if recorded is None:
            assumptions.append("all ranks are on one node (--nodes)")
    node = _or_assumed(
        request.node_gb_per_s,
        NODE_GB_PER_S,
        f"{NODE_GB_PER_S:g} GB/s inside a node (--node-gbps)",
        assumptions,
    )
    told = assumptions if num_nodes > 1 else []
    link = _or_assumed(
        request.link_gb_per_s, LINK_GB_PER_S, f"{LINK_GB_PER_S:g} GB/s between nodes (--link-gbps)", told
    )
    return Topology(num_ranks=num_ranks, num_nodes=num_nodes, node_gb_per_s=node, link_gb_per_s=link)


def _cost(
    series: LoadSeries,
    request: ReplayRequest,
    topology: Topology,
    assumptions: list[str],
    warnings: list[str],
) -> StepCost:
    gemm = fit_gemm(series.gemm)
    if request.us_per_row is not None:
        gemm = GemmTime(start_us=0.0, us_per_row=request.us_per_row, basis=Basis.GIVEN)
    elif gemm is None:
        gemm = GemmTime(start_us=0.0, us_per_row=MICROSECONDS_PER_ROW, basis=Basis.ASSUMED)
        assumptions.append(f"experts' time is {MICROSECONDS_PER_ROW:g} us per row and layer (--us-per-row)")
    sent = series.communication
    row_bytes = request.row_bytes
    if row_bytes is None and sent is not None and sent.bytes is not None and sent.rows.sum() > 0:
        row_bytes = float(sent.bytes.sum() / sent.rows.sum())
    row_bytes = _or_assumed(
        row_bytes, ROW_BYTES, f"a dispatched row has {ROW_BYTES:.0f} bytes (--row-bytes)", assumptions
    )
    top_k = request.top_k or series.top_k
    copies = Copies(request.copies)
    if top_k is None and copies is not Copies.PAIR:
        warnings.append(
            "experts per token are not known, so every pair counts as a copy of its row: give --top-k"
        )
    is_training = series.forward_mode is ForwardMode.TRAIN
    return StepCost(
        topology=topology,
        gemm=gemm,
        row_bytes=row_bytes,
        copies=copies,
        top_k=top_k,
        num_groups=series.num_groups if series.num_ranks == topology.num_ranks else 1,
        # Backward: gradients of inputs and of weights, and rows there and back once more.
        passes=3.0 if is_training else 1.0,
        exchanges=4.0 if is_training else 2.0,
    )


def _or_assumed(value: float | None, typical: float, what: str, assumptions: list[str]) -> float:
    if value is not None:
        return value
    assumptions.append(what)
    return typical
