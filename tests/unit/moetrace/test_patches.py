"""Attributes are replaced, and the very same objects come back."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from moetrace.guard import Guard
from moetrace.instrument.patches import Patches, mark_of
from moetrace.instrument.wrap import timed
from moetrace.record.buffer import StepBuffer
from moetrace.testing import FakeTime
from moetrace.timing.clock import HostClock


class Recorder:
    """Always recording."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.buffer: StepBuffer | None = StepBuffer(HostClock(FakeTime().now_ns), 64)

    def record_failed(self, error: BaseException) -> None:
        """Let the test see it."""
        raise error

    @property
    def calls(self) -> int:
        """How many calls were recorded."""
        assert self.buffer is not None
        return len(self.buffer.intervals())


class Doubler(nn.Module):
    """Its weight decides what it computes, so that a copy shows whose weight it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled by its weight."""
        return x * self.weight


def wrap(patches: Patches, recorder: Recorder, owner: Any, attribute: str = "forward") -> None:
    """Wrap one attribute."""
    patches.replace(owner, attribute, lambda current: timed(current, recorder, 0))


def test_an_inherited_attribute_is_absent_again() -> None:
    """What was not on the instance before is not there afterwards; the method is the class's own."""
    module, patches = Doubler(), Patches()
    before = dict(vars(module))
    wrap(patches, Recorder(), module)
    assert mark_of(module.forward)
    patches.restore()
    assert vars(module) == before
    assert module.forward.__func__ is Doubler.forward


def test_an_instance_attribute_comes_back_as_the_very_same_object() -> None:
    """A framework's own instance-level forward is restored by identity."""
    module, patches = Doubler(), Patches()

    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    module.forward = own  # type: ignore[method-assign]
    wrap(patches, Recorder(), module)
    assert module.forward is not own
    patches.restore()
    assert vars(module)["forward"] is own


def test_class_and_module_attributes_come_back_as_the_very_same_objects() -> None:
    """Plain, static and inherited class attributes, and a module's function."""

    class Base:
        def inherited(self) -> str:
            return "inherited"

    class Framework(Base):
        @staticmethod
        def static() -> str:
            return "static"

        def plain(self) -> str:
            return "plain"

    library = ModuleType("library")

    def function() -> int:
        return 1

    library.function = function  # type: ignore[attr-defined]
    before = dict(vars(Framework))
    patches, recorder = Patches(), Recorder()
    for name in ("inherited", "plain"):
        wrap(patches, recorder, Framework, name)
    wrap(patches, recorder, library, "function")
    assert Framework().inherited() == "inherited"
    assert Framework().plain() == "plain"
    assert library.function() == 1
    assert recorder.calls == 3
    patches.restore()
    assert dict(vars(Framework)) == before
    assert "inherited" not in vars(Framework)
    assert vars(library)["function"] is function


def test_stacked_patches_of_one_attribute_are_undone_in_reverse_order() -> None:
    """Two wrappers of one forward both record, and nothing of either is left."""
    module, patches, recorder = Doubler(), Patches(), Recorder()
    before = dict(vars(module))
    wrap(patches, recorder, module)
    wrap(patches, recorder, module)
    module(torch.tensor(1.0))
    assert recorder.calls == 2
    patches.restore()
    assert vars(module) == before


def test_two_owners_of_patches_may_let_go_in_either_order() -> None:
    """Whoever goes first, nothing of ours is left when both are gone."""
    for order in ((0, 1), (1, 0)):
        module, recorder = Doubler(), Recorder()
        before = dict(vars(module))
        both = Patches(), Patches()
        for patches in both:
            wrap(patches, recorder, module)
        both[order[0]].restore()
        module(torch.tensor(1.0))
        assert recorder.calls == 1
        both[order[1]].restore()
        assert vars(module) == before


def foreign(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another tool's wrapper."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) + 1

    return wrapper


def test_somebody_elses_wrapper_over_ours_is_left_alone_and_ours_goes_silent() -> None:
    """Their wrapper still calls ours, which is now the plain call; `left_alone` says where."""
    module, patches, recorder = Doubler(), Patches(), Recorder()
    wrap(patches, recorder, module)
    theirs = foreign(module.forward)
    module.forward = theirs  # type: ignore[method-assign]
    patches.restore()
    assert module.forward is theirs
    assert module(torch.tensor(3.0)).item() == 7.0
    assert recorder.calls == 0
    assert patches.left_alone == ["Doubler.forward"]


def test_a_foreign_wrapper_over_ours_is_not_taken_for_ours() -> None:
    """functools.wraps copies marks; only the wrapper itself counts."""
    module, patches = Doubler(), Patches()
    wrap(patches, Recorder(), module)
    assert mark_of(module.forward)
    assert mark_of(foreign(module.forward)) is None
    assert mark_of(Doubler.forward) is None


def test_an_attribute_that_does_not_exist_is_not_invented() -> None:
    """Nothing is patched, and nothing is left to undo."""
    module, patches = Doubler(), Patches()
    before = dict(vars(module))
    with pytest.raises(AttributeError):
        wrap(patches, Recorder(), module, "dispatch")
    assert len(patches) == 0
    assert vars(module) == before


def test_state_dict_and_parameters_do_not_change() -> None:
    """A wrapped module saves and lists exactly what it did before."""
    module, patches = Doubler(), Patches()
    before = copy.deepcopy(module.state_dict())
    wrap(patches, Recorder(), module)
    assert module.state_dict() == before
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert [name for name, _ in module.named_modules()] == [""]


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_a_copy_is_a_module_of_its_own_without_our_wrappers(copied: str) -> None:
    """It computes with its own weights (a wrapper is bound to the original), and records nothing."""
    module, patches, recorder = Doubler(), Patches(), Recorder()
    wrap(patches, recorder, module)
    wrap(patches, recorder, module)
    twin = copy.deepcopy(module) if copied == "deepcopy" else pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        module.weight.fill_(100.0)
    assert twin(torch.tensor(3.0)).item() == 6.0
    assert recorder.calls == 0
    assert set(vars(twin)) == set(vars(Doubler()))
    assert mark_of(module.forward)


def test_a_copy_keeps_what_others_had_put_on_the_instance() -> None:
    """Only our wrappers are left out of a copy."""
    module, patches = Doubler(), Patches()

    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    module.forward = own  # type: ignore[method-assign]
    wrap(patches, Recorder(), module)
    assert vars(copy.deepcopy(module))["forward"] is own


def test_a_class_with_its_own_way_of_pickling_keeps_it() -> None:
    """What its `__getstate__` leaves out stays out."""

    class Sparse(Doubler):
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "cache": None}

    module, patches = Sparse(), Patches()
    module.cache = "large"  # type: ignore[assignment]
    wrap(patches, Recorder(), module)
    twin = copy.deepcopy(module)
    assert twin.cache is None
    assert "forward" not in vars(twin)
