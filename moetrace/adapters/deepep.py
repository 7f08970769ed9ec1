"""DeepEP: communication buffers that several frameworks exchange rows with.

A buffer belongs to no layer; its calls are exchanges of the layer that makes them, dispatch or combine
by their place around the experts. They may return at launch, and end with the event that the caller
waits for, or with the hook that the caller runs to receive.
"""

from __future__ import annotations

import sys
from typing import Any

from moetrace.adapters.base import Call, Target
from moetrace.record.sites import Role

PACKAGE = "deep_ep"
CLASSES = ("Buffer", "ElasticBuffer")
METHODS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")


def exchanges() -> list[Target]:
    """Targets of the imported package; none where it is not imported."""
    package = sys.modules.get(PACKAGE)
    targets = []
    for owner in (getattr(package, name, None) for name in CLASSES):
        targets += [
            _target(owner, name, Role.EXCHANGE, Call.RECEIVE) for name in METHODS if hasattr(owner, name)
        ]
    event = getattr(package, "EventOverlap", None) or getattr(
        sys.modules.get(f"{PACKAGE}.utils"), "EventOverlap", None
    )
    if hasattr(event, "current_stream_wait"):
        targets.append(_target(event, "current_stream_wait", Role.WAIT, Call.WAIT_WORK))
    return targets


def _target(owner: Any, attribute: str, role: Role, call: Call) -> Target:
    return Target(
        owner=owner,
        attribute=attribute,
        role=role,
        name=f"{PACKAGE}.{owner.__name__}.{attribute}",
        call=call,
        shared=True,
        per_step=False,
    )
