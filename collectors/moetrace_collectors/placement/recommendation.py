"""From scored options to one sentence: what to do, or that it does not pay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moetrace_collectors.placement.alternatives import Alternative, Option
from moetrace_collectors.placement.replay import ReplayCase, folds
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
    """
    candidates = [
        option
        for option in options
        if option.option in (Option.MOVE, Option.REPLICATE) and option.possible and option.result is not None
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
            f"migrating {cost.bytes / 1e9:.1f} GB takes {cost.seconds:.2f} s "
            f"and is won back in {best.break_even_s:.0f} s; shorter in {won} of {num_folds} held-out windows"
        )
    moves = action not in (Action.DO_NOT_MOVE, Action.NOT_ENOUGH_EVIDENCE)
    return Recommendation(
        action=action,
        planner=best.result.planner if moves else None,
        slots=best.result.placement.num_slots if moves else None,
        saved=best.saved,
        net_saved=net_saved,
        break_even_s=best.break_even_s,
        reasons=tuple(reasons),
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
        f"{best.option} with {best.result.planner} on {best.result.placement.num_slots} slots {change} "
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
        f"migrating takes {best.migration.seconds:.1f} s, which leaves {100 * net_saved:.1f} % over "
        f"{case.horizon_s:g} s: it does not pay"
    )
