"""Recorders by number: what a compiled graph holds of them, for it outlives the objects of its trace."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

NOBODY = 0
"""The key of a wrapper that leaves no marks in graphs: retired, or switched off."""

_recorders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_key = itertools.count(NOBODY + 1)


def key_of(recorder: Any) -> int:
    """The number of a recorder, given at the first question; NOBODY for one that wants no marks in graphs."""
    if not getattr(recorder, "marks_in_graphs", True):
        return NOBODY
    key = _keys.get(recorder)
    if key is None:
        key = next(_next_key)
        _keys[recorder] = key
        _recorders[key] = recorder
    return key


def find(key: int) -> Any | None:
    """The recorder of a number; None where it is gone."""
    return _recorders.get(key)
