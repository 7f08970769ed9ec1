"""Why the suspect was late (pure): first version, by phase only."""

from __future__ import annotations

from moetrace_schemas.enums import Cause, Phase

CAUSE_BY_PHASE: dict[Phase, Cause] = {
    Phase.OUTSIDE: Cause.OUTSIDE,
    Phase.SCHEDULE: Cause.OUTSIDE,
    Phase.ACCEPT: Cause.OUTSIDE,
    Phase.DISPATCH: Cause.HOST,
    Phase.COMBINE: Cause.HOST,
    Phase.ROUTER: Cause.DEVICE,
    Phase.PERMUTE: Cause.DEVICE,
    Phase.UNPERMUTE: Cause.DEVICE,
    Phase.SHARED_EXPERT: Cause.DEVICE,
    Phase.FUSED: Cause.UNKNOWN,
    Phase.EXPERT_GEMM: Cause.UNKNOWN,
}
