"""Shapes of phase rows that are decoded once: same rows, same refusals, bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.decode_columns import decode_phases
from moetrace_collectors.model import PhaseColumns
from moetrace_collectors.phase_shapes import SHAPE_ROWS, PhaseShapes
from moetrace_schemas.columns import PHASES, ColumnsError, pack

SHAPE = ("layer", "phase", "direction", "microbatch", "ordinal", "stream", "flags")


def block(layers: list[int], starts: list[int], *, duration_ns: int = 5) -> bytes:
    """One row per layer, all of phase 0."""
    number = len(layers)
    zeros, unknown = [0] * number, [-1] * number
    figures = [starts, [duration_ns] * number, unknown, unknown]
    return pack(PHASES, [layers, *[zeros] * (len(SHAPE) - 1), *figures])


def as_lists(rows: PhaseColumns) -> dict[str, list[int]]:
    """Plain values."""
    return {name: getattr(rows, name).tolist() for name in PhaseColumns.__slots__}


@given(
    steps=st.lists(
        st.tuples(
            st.permutations([0, 1, 2]),
            st.lists(st.integers(-5, 50), min_size=3, max_size=3),
            st.integers(0, 2),
        ),
        max_size=8,
    )
)
def test_rows_are_those_of_a_decoder_that_remembers_nothing(
    steps: list[tuple[list[int], list[int], int]],
) -> None:
    """Whatever came before, in whatever order rows start, and whatever microbatch they are of."""
    shapes = PhaseShapes(max_rows=80)
    for layers, starts, microbatch in steps:
        data = block(layers, starts)
        with_memory = decode_phases(data, microbatch=microbatch, shapes=shapes)
        assert as_lists(with_memory) == as_lists(decode_phases(data, microbatch=microbatch))


def test_steps_of_one_shape_share_its_arrays() -> None:
    """So whoever looks at many ranks can tell at once that they have recorded the same rows."""
    shapes = PhaseShapes()
    one = decode_phases(block([0, 1], [0, 9]), shapes=shapes)
    other = decode_phases(block([0, 1], [3, 12], duration_ns=7), shapes=shapes)
    assert all(getattr(one, name) is getattr(other, name) for name in SHAPE)
    assert one.start_offset_ns.tolist() == [0, 9]
    assert other.start_offset_ns.tolist() == [3, 12]
    assert other.duration_ns.tolist() == [7, 7]


def test_shared_arrays_cannot_be_written_to() -> None:
    """A consumer that changed one would change it in other steps as well."""
    rows = decode_phases(block([0, 1], [0, 9]), shapes=PhaseShapes())
    with pytest.raises(ValueError, match="read-only"):
        rows.layer[0] = 7


def test_a_bad_shape_is_refused_every_time() -> None:
    """Only what was checked is remembered."""
    shapes = PhaseShapes()
    for _ in range(2):
        with pytest.raises(ColumnsError, match="occurs twice"):
            decode_phases(block([4, 4], [0, 9]), shapes=shapes)
    assert shapes.num_rows == 0


def test_figures_are_checked_in_every_block() -> None:
    """A known shape says nothing about times."""
    shapes = PhaseShapes()
    decode_phases(block([0, 1], [0, 9]), shapes=shapes)
    with pytest.raises(ColumnsError, match="column duration_ns: -1 is outside 0 to"):
        decode_phases(block([0, 1], [0, 9], duration_ns=-1), shapes=shapes)
    with pytest.raises(ColumnsError, match="column duration_ns: values add up to more"):
        decode_phases(block([0, 1], [0, 9], duration_ns=2**53), shapes=shapes)


def test_the_least_recently_used_shape_goes() -> None:
    """A sender that makes up shapes costs bounded memory, and those in use stay."""
    shapes = PhaseShapes(max_rows=2 * (SHAPE_ROWS + 2))
    used = decode_phases(block([0, 1], [0, 9]), shapes=shapes)
    for layer in range(2, 12):
        decode_phases(block([layer, layer + 1], [0, 9]), shapes=shapes)
        assert decode_phases(block([0, 1], [0, 9]), shapes=shapes).layer is used.layer
        assert shapes.num_rows <= 2 * (SHAPE_ROWS + 2)


def test_a_shape_larger_than_all_of_it_is_not_kept() -> None:
    """It is decoded all the same."""
    shapes = PhaseShapes(max_rows=SHAPE_ROWS + 2)
    rows = decode_phases(block([0, 1, 2], [0, 9, 20]), shapes=shapes)
    assert rows.layer.tolist() == [0, 1, 2]
    assert np.array_equal(rows.duration_ns, [5, 5, 5])
    assert shapes.num_rows == 0
