"""Replaces attributes and puts the very same objects back.

An attribute may be patched on an instance (a module's `forward`), a class or a module. Patches of one
attribute stack; if somebody else replaced the attribute meanwhile, theirs is left alone and ours,
which theirs may still call, becomes a pass-through.

A patched instance is copied and pickled without our wrappers: a wrapper is bound to the object that
it was made for, and a copy that kept it would compute with the original's weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, cast

MARK = "__moetrace_wrapper__"
"""Attribute of our wrappers: their `WrapperMark`."""

_ABSENT = object()


@dataclass(slots=True, eq=False)
class WrapperMark:
    """What a wrapper of ours knows about itself."""

    wrapper: Callable[..., Any]
    """Itself: functools.wraps copies the mark to foreign wrappers over ours, and they are not ours."""
    function: Callable[..., Any]
    """The callable underneath."""
    make_passive: Callable[[], None]
    retired: bool = False
    made_for: weakref.ref[Any] | None = None
    """The tracer whose `wrap` returned it: nobody can put it back when that tracer ends."""

    def retire(self) -> None:
        """Turn the wrapper into a pass-through for good."""
        self.retired = True
        self.make_passive()


def mark_wrapper(
    wrapper: Callable[..., Any], function: Callable[..., Any], make_passive: Callable[[], None]
) -> Callable[..., Any]:
    """Mark a wrapper as ours; returns it."""
    setattr(wrapper, MARK, WrapperMark(wrapper, function, make_passive))
    return wrapper


def mark_of(function: object) -> WrapperMark | None:
    """The mark of a wrapper of ours; None for everything else, foreign wrappers over ours included."""
    mark = getattr(function, MARK, None)
    return mark if isinstance(mark, WrapperMark) and mark.wrapper is function else None


@dataclass(slots=True)
class Patch:
    """One replaced attribute."""

    owner: Any
    attribute: str
    replacement: Any
    previous: Any
    """What stood in the owner's own namespace; _ABSENT where the attribute was inherited."""


class Patches:
    """All replaced attributes of one instrumented model."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self.sites: dict[int, tuple[Any, str]] = {}
        """Call sites that the wrappers stand for, and their owner and attribute."""
        self._clean_states: list[_CleanState] = []
        self.left_alone: list[str] = []
        """Attributes that somebody else had replaced by the time of `restore`."""

    def replace(self, owner: Any, attribute: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Put `make(current)` in place of `owner.attribute`.

        Raises:
            AttributeError: the owner has no such attribute, or does not let it be set.
        """
        current = getattr(owner, attribute)
        previous = vars(owner).get(attribute, _ABSENT)
        replacement = make(current)
        setattr(owner, attribute, replacement)
        self._patches.append(Patch(owner, attribute, replacement, previous))
        if not isinstance(owner, type | ModuleType):
            self._clean_states.append(_CleanState.on(owner))

    def restore(self) -> None:
        """Undo everything, last first."""
        self.sites.clear()
        while self._patches:
            patch = self._patches.pop()
            if vars(patch.owner).get(patch.attribute) is not patch.replacement:
                self.left_alone.append(f"{_name(patch.owner)}.{patch.attribute}")
                if mark := mark_of(patch.replacement):
                    mark.retire()
                continue
            previous = _unwrapped(patch.owner, patch.attribute, patch.previous, retired_only=True)
            if previous is _ABSENT:
                delattr(patch.owner, patch.attribute)
            else:
                setattr(patch.owner, patch.attribute, previous)
        while self._clean_states:
            self._clean_states.pop().leave()

    def __len__(self) -> int:
        return len(self._patches)


class _CleanState:
    """An instance's `__getstate__`, for copy.deepcopy and pickle: its state without our wrappers."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._patches = 0
        owner.__getstate__ = self

    @classmethod
    def on(cls, owner: Any) -> _CleanState:
        """That of an owner, for one more patch."""
        present = vars(owner).get("__getstate__")
        state = present if isinstance(present, cls) else cls(owner)
        state._patches += 1
        return state

    def leave(self) -> None:
        """One patch less; the last one takes it off the owner."""
        self._patches -= 1
        if self._patches == 0 and vars(self._owner).get("__getstate__") is self:
            del self._owner.__getstate__

    def __call__(self) -> Any:
        state = cast(Any, type(self._owner)).__getstate__(self._owner)
        if not isinstance(state, dict):
            return state
        clean = {
            name: _unwrapped(self._owner, name, value)
            for name, value in state.items()
            if not isinstance(value, _CleanState)
        }
        return {name: value for name, value in clean.items() if value is not _ABSENT}


def _unwrapped(owner: Any, attribute: str, value: Any, *, retired_only: bool = False) -> Any:
    """`value` without our wrappers; _ABSENT where that is only what the owner's class says anyway."""
    changed = False
    while (mark := mark_of(value)) and (mark.retired or not retired_only):
        value, changed = mark.function, True
    inherited = (
        changed
        and isinstance(value, MethodType)
        and value.__self__ is owner
        and getattr(type(owner), attribute, None) is value.__func__
    )
    return _ABSENT if inherited else value


def _name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__)))
