"""Targets that most adapters have, spelled once."""

from __future__ import annotations

from typing import Any

from moetrace.adapters.base import Call, Count, Target
from moetrace.record.sites import Role
from moetrace_schemas.enums import CountKind, Phase


def layer_forward(owner: Any, layer: int, name: str, own_time: Phase | None = None) -> Target:
    """A whole MoE block; `own_time` is what it does between its parts, where that is no glue."""
    return Target(owner=owner, attribute="forward", role=Role.LAYER, phase=own_time, layer=layer, name=name)


def phase(owner: Any, attribute: str, layer: int, name: str, kind: Phase, *, per_step: bool = True) -> Target:
    """One phase of one layer."""
    return Target(
        owner=owner,
        attribute=attribute,
        role=Role.PHASE,
        phase=kind,
        layer=layer,
        name=name,
        per_step=per_step,
    )


def experts_call(
    owner: Any, attribute: str, layer: int, name: str, kind: Phase = Phase.EXPERT_GEMM
) -> Target:
    """The call of a layer's experts; `kind` is its phase where its GEMMs are not wrapped themselves."""
    return Target(
        owner=owner,
        attribute=attribute,
        role=Role.EXPERTS,
        phase=kind,
        layer=layer,
        name=name,
    )


def count(
    owner: Any,
    attribute: str,
    layer: int,
    name: str,
    look: Count,
    kind: CountKind = CountKind.ROUTED,
) -> Target:
    """A call that is counted; named after the timed target of the same callable, and placed after it."""
    return Target(
        owner=owner,
        attribute=attribute,
        role=Role.PHASE,
        layer=layer,
        name=name,
        call=Call.COUNT,
        count=look,
        count_kind=kind,
        per_step=False,
    )


def function(owner: Any, attribute: str, kind: Phase, *, per_step: bool = True) -> Target:
    """A function of the framework that all layers call: one phase of the layer that calls it."""
    return Target(
        owner=owner,
        attribute=attribute,
        role=Role.PHASE,
        phase=kind,
        name=f"{owner.__name__}.{attribute}",
        shared=True,
        per_step=per_step,
    )


def exchange(owner: Any, attribute: str, name: str, call: Call = Call.TIMED) -> Target:
    """A collective of the framework that all layers call."""
    return Target(
        owner=owner,
        attribute=attribute,
        role=Role.EXCHANGE,
        name=name,
        call=call,
        shared=True,
        per_step=False,
    )
