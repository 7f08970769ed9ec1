"""Replaces attributes and puts the very same objects back.

An attribute may be patched on an instance (a module's `forward`), a class or a module. Patches of one
attribute stack and are undone in reverse order; if somebody else replaced the attribute meanwhile,
theirs is left alone and ours becomes a pass-through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "__moetrace_wrapped__"
"""Attribute of our wrappers: the callable underneath."""

_ABSENT = object()


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

    def restore(self) -> None:
        """Undo everything, last first."""
        while self._patches:
            patch = self._patches.pop()
            if vars(patch.owner).get(patch.attribute) is not patch.replacement:
                self.left_alone.append(f"{_name(patch.owner)}.{patch.attribute}")
                continue
            if patch.previous is _ABSENT:
                delattr(patch.owner, patch.attribute)
            else:
                setattr(patch.owner, patch.attribute, patch.previous)

    def __len__(self) -> int:
        return len(self._patches)


def _name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__)))


def is_wrapped(function: object) -> bool:
    """Whether a callable is one of our wrappers."""
    return hasattr(function, MARK)
