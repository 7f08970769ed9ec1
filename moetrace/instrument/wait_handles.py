"""Under which names a launched collective is waited for."""

from __future__ import annotations

from typing import Any


def handle_of(result: Any) -> int:
    """What will be waited for, by the result of a collective; 0 where it is there already.

    A functional collective returns a tensor that is waited for at its first use, maybe through a
    view of it; an asynchronous one a Work object. Work handles are below 0: they are never guessed.
    """
    if getattr(result, "completed", None) is False:
        return id(result.elem)
    return -id(result) if hasattr(result, "is_completed") else 0


def tensor_handles(tensor: Any) -> tuple[int, ...]:
    """Names under which a tensor that is waited for may have been launched."""
    return id(tensor), id(getattr(tensor, "elem", tensor))


def work_handles(work: Any) -> tuple[int, ...]:
    """The name under which a Work object was launched."""
    return (-id(work),)
