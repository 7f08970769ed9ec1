"""Functions and classes that all models of a process share: one wrapper serves them, put there once.

Those are torch.distributed's all-to-alls and the exchanges of libraries, functions of a framework that an
adapter names, the calls of serving engines, and Triton's autotuner.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from moetrace.adapters import deepep
from moetrace.adapters.base import Call, EngineCall, Target
from moetrace.instrument.patches import Patches
from moetrace.instrument.step_kind import TUNER, engine_step, tuning_noted
from moetrace.record.sites import Role

if TYPE_CHECKING:
    from moetrace.instrument.placing import Placing
    from moetrace.tracer import Tracer

logger = logging.getLogger("moetrace")


class FrameworkFunctions:
    """Shared wrappers of one tracer."""

    def __init__(self, tracer: Tracer, placing: Placing) -> None:
        self._tracer = tracer
        self._placing = placing
        self.patches = Patches()
        self._keys: set[tuple[int, str]] = set()
        self.not_wrapped: dict[str, str] = {}
        """By name, and why they are left alone."""

    def take(self, owner: Any, attribute: str) -> bool:
        """Whether nobody has asked for this one before: then it is the caller's to wrap."""
        key = (id(owner), attribute)
        if key in self._keys:
            return False
        self._keys.add(key)
        return True

    def wrap_engine(self, calls: Iterable[EngineCall]) -> None:
        """Let calls of a serving engine say what a step is for."""
        for call in calls:
            if self.take(call.owner, call.attribute):
                make = functools.partial(engine_step, owner=self._tracer, call=call)
                self.patches.replace(call.owner, call.attribute, make)

    def hook_collectives(self) -> None:
        """Wrap torch.distributed's all-to-alls, so that an exchange is told apart from work around it."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return
        functional = _functional_collectives()
        owners: list[tuple[Any, str, Call, Role]] = [
            (distributed, "all_to_all_single", Call.LAUNCH, Role.EXCHANGE),
            (distributed, "all_to_all", Call.LAUNCH, Role.EXCHANGE),
            (getattr(distributed, "Work", None), "wait", Call.WAIT_WORK, Role.WAIT),
            (functional, "all_to_all_single", Call.LAUNCH, Role.EXCHANGE),
            (functional, "wait_tensor", Call.WAIT, Role.WAIT),
        ]
        for owner, attribute, call, role in owners:
            if owner is None or not hasattr(owner, attribute):
                continue
            name = f"{owner.__name__}.{attribute}"
            self._place(
                Target(owner=owner, attribute=attribute, role=role, name=name, call=call, per_step=False)
            )
        for target in deepep.exchanges():
            self._place(target)

    def watch_tuning(self) -> None:
        """Let Triton's autotuner say when it tries configurations; nothing where it was not imported."""
        tuner = getattr(sys.modules.get(TUNER), "Autotuner", None)
        if tuner is not None and self.take(tuner, "prune_configs"):
            make = functools.partial(tuning_noted, kind=self._tracer.kind)
            self.patches.replace(tuner, "prune_configs", make)

    def _place(self, target: Target) -> None:
        if not self.take(target.owner, target.attribute):
            return
        try:
            self._placing.place(self.patches, target)
        except (AttributeError, TypeError, ValueError) as error:
            logger.warning("moetrace: %s cannot be wrapped: %s", target.name, error)
            self.not_wrapped[target.name] = f"cannot be wrapped: {error}"

    def restore(self) -> None:
        """Put all of them back."""
        self.patches.restore()
        self._keys.clear()


def _functional_collectives() -> Any | None:
    try:
        return importlib.import_module("torch.distributed._functional_collectives")
    except ImportError as error:
        logger.warning("moetrace: exchanges inside of functional collectives are not told apart: %s", error)
        return None
