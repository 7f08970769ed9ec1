"""What steps of one model have in common, decoded and checked once. Part of the decode stage.

A model runs the same layers and phases in every step on every rank: of a phase row only the times and sizes
change. The other columns lie together at the front of a block, so blocks with the same bytes there share
their arrays, which are as good as checked::

    block | header | layer phase direction microbatch ordinal stream flags | start duration bytes rows |
                    '---------------- one shape, known by its bytes -------' '---- of this step ------'
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from moetrace_collectors.model import IntArray

MAX_CACHED_ROWS = 262_144
"""Some 20 MB. A model of 60 layers has 600 rows a step, so hundreds of shapes: one per number of microbatches
or kind of step."""
SHAPE_ROWS = 32
"""What a shape without rows takes, in rows: eight arrays and a place to find them."""

Shape = Mapping[str, IntArray]
"""Columns by name; read-only arrays."""


class PhaseShapes:
    """The shapes used last, by their bytes; safe from any thread."""

    def __init__(self, *, max_rows: int = MAX_CACHED_ROWS) -> None:
        """Remember nothing yet.

        Args:
            max_rows: size of all shapes that are kept, `SHAPE_ROWS` for each on top of its rows; a larger
                one is not kept at all.
        """
        self._max_rows = max_rows
        self._shapes: OrderedDict[bytes, Shape] = OrderedDict()
        self._num_rows = 0
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        """Size of what is kept, in rows."""
        return self._num_rows

    def find(self, block: bytes) -> Shape | None:
        """The shape with these bytes, where it is known."""
        with self._lock:
            shape = self._shapes.get(block)
            if shape is not None:
                self._shapes.move_to_end(block)
            return shape

    def keep(self, block: bytes, shape: Shape) -> Shape:
        """Keep a checked shape; its arrays must not be written to any more.

        Returns:
            The one to use: another thread may have been first.
        """
        num_rows = _size(shape)
        for column in shape.values():
            column.flags.writeable = False
        if num_rows > self._max_rows:
            return shape
        with self._lock:
            known = self._shapes.setdefault(block, shape)
            if known is not shape:
                return known
            self._num_rows += num_rows
            while self._num_rows > self._max_rows:
                _, oldest = self._shapes.popitem(last=False)
                self._num_rows -= _size(oldest)
        return shape


def _size(shape: Shape) -> int:
    return SHAPE_ROWS + len(shape["layer"])
