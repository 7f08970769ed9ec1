"""From scored options to one sentence: what to do, or that it does not pay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moetrace_collectors.number_format import count, duration_text
from moetrace_collectors.placement.alternatives import Alternative, Option
from moetrace_collectors.placement.replay import PlannerResult, ReplayCase, folds
from moetrace_collectors.placement.step_cost import Basis


class Action(StrEnum):
    """What is recommended."""

    DO_NOT_MOVE = "do not move"
    MOVE = "move"
    REPLICATE = "replicate"
    NOT_ENOUGH_EVIDENCE = "not enough evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One answer with its reasons."""

    action: Action
    planner: str | None
    """Whose placement; None where nothing is moved."""
    slots: int | None
    saved: float
    """Part of a step that the best option saves on held-out windows."""
    net_saved: float
    """The same less the time lost by migrating, over the horizon."""
    break_even_s: float | None
    reasons: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The answer, for people."""
        return f"{self.action}: {'; '.join(self.reasons)}."


def recommend(case: ReplayCase, options: Sequence[Alternative]) -> Recommendation:
    """Choose between staying, moving and replicating; the others change more than a placement.

    ::

        net saved = saved - migration seconds / horizon

    More slots than today's take memory that a recording says nothing of: they are recommended only where
    the user asked for as many, or said how much memory there is.
    """
    candidates = [
        option
        for option in options
        if option.option in (Option.MOVE, Option.REPLICATE)
        and option.possible
        and option.result is not None
        and _has_room(case, option.result)
    ]
    net = {id(option): _net(case, option) for option in candidates}
    best = max(candidates, key=lambda option: net[id(option)], default=None)
    if best is None or best.result is None or best.saved is None:
        return Recommendation(
            action=Action.DO_NOT_MOVE,
            planner=None,
            slots=None,
            saved=0.0,
            net_saved=0.0,
            break_even_s=None,
            reasons=("no other placement fits in memory",),
        )
    num_folds = len(folds(len(case.series.loads), case.windows))
    reasons = [_gain(case, best)]
    if case.cost.gemm.basis is Basis.ASSUMED:
        reasons.append("times are assumed, so this is a part of the experts' and exchanges' time alone")
    elif case.series.step_ms is None:
        reasons.append(
            "step times are not recorded, so this is a part of the experts' and exchanges' time alone"
        )
    net_saved = net[id(best)]
    if num_folds == 0:
        action = Action.NOT_ENOUGH_EVIDENCE
        reasons.append("with one entry there is no future to score on: record more steps")
    elif net_saved < case.min_gain or best.break_even_s is None:
        action = Action.DO_NOT_MOVE
        reasons.append(_too_little(case, best, net_saved))
    else:
        action = Action(best.option.value)
        cost = best.result.migration
        won = best.result.held_out.better_folds if best.result.held_out else 0
        reasons.append(
            f"migrating {cost.bytes / 1e9:.1f} GB takes {duration_text(cost.seconds * 1e9)} "
            f"and is won back within {best.break_even_s:.1f} s; steps are shorter in {won} of "
            f"{count(num_folds, 'held-out window')}"
        )
    moves = action not in (Action.DO_NOT_MOVE, Action.NOT_ENOUGH_EVIDENCE)
    return Recommendation(
        action=action,
        planner=best.result.planner if moves else None,
        slots=best.result.placement.num_slots if moves else None,
        saved=best.saved,
        net_saved=net_saved,
        break_even_s=best.break_even_s,
        reasons=(*reasons, *_if_there_is_room(case, options)),
    )


def _has_room(case: ReplayCase, result: PlannerResult) -> bool:
    asked = max(case.num_slots, case.today.num_slots)
    return result.placement.num_slots <= asked or case.memory.memory_gb is not None


def _if_there_is_room(case: ReplayCase, options: Sequence[Alternative]) -> tuple[str, ...]:
    """What more slots would be worth, where nobody said whether they fit."""
    return tuple(
        f"with {option.memory_gb:.1f} GB more per rank, {option.result.placement.num_slots} slots would save "
        f"{100 * option.saved:.1f} %: give --slots {option.result.placement.num_slots}, or --memory-gb"
        for option in options
        if option.result is not None
        and not _has_room(case, option.result)
        and option.saved is not None
        and option.saved >= case.min_gain
    )


def _net(case: ReplayCase, option: Alternative) -> float:
    lost = option.migration.seconds / case.horizon_s if option.migration else 0.0
    return (option.saved or 0.0) - lost


def _gain(case: ReplayCase, best: Alternative) -> str:
    assert best.saved is not None  # scored, like every option that moves experts
    assert best.result is not None
    scored = "held-out windows" if best.result.held_out else "the loads it was planned on"
    change = "saves" if best.saved >= 0.0 else "costs"
    return (
        f"the placement of planner {best.result.planner} on {best.result.placement.num_slots} slots {change} "
        f"{100 * abs(best.saved):.1f} % of a step on {scored}"
    )


def _too_little(case: ReplayCase, best: Alternative, net_saved: float) -> str:
    assert best.saved is not None  # as above
    assert best.migration is not None
    if best.saved <= 0.0:
        return "nothing would be won"
    if best.saved < case.min_gain:
        return f"less than {100 * case.min_gain:g} % is not worth a change"
    return (
        f"migrating takes {duration_text(best.migration.seconds * 1e9)}, which leaves "
        f"{100 * net_saved:.1f} % over {case.horizon_s:g} s: it does not pay"
    )
