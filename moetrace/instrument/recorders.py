"""Recorders by number: what a compiled graph holds of them, for it outlives the objects of its trace."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

NOBODY = 0
"""The key of a wrapper that leaves no marks in graphs: retired, or switched off."""
WITH_BACKWARD = 1
"""Bit of a key: the recorder wants backward too. In the key, so that a graph out of a cache on disk, which
is found by what it was made from, is never one of the other kind."""

REFERENCES: dict[int, weakref.ref[Any]] = {}
"""Recorders that are alive by number. A plain dictionary: marks look here in every step."""
_keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def key_of(recorder: Any) -> int:
    """The number of a recorder, given at the first question; NOBODY for one that wants no marks in graphs."""
    config = getattr(recorder, "config", None)
    if config is not None and not config.compiled:
        return NOBODY
    key = _keys.get(recorder)
    if key is None:
        backward = config is not None and config.backward
        key = next(_next_number) << 1 | (WITH_BACKWARD if backward else 0)
        _keys[recorder] = key
        REFERENCES[key] = weakref.ref(recorder, functools.partial(_forget, REFERENCES, key))
    return key


def _forget(references: dict[int, weakref.ref[Any]], key: int, gone: object) -> None:
    # Takes the table as an argument: at the end of the interpreter there are no globals left.
    references.pop(key, None)


def find(key: int) -> Any | None:
    """The recorder of a number; None where it is gone."""
    reference = REFERENCES.get(key)
    return reference() if reference is not None else None
