"""Rows of hand-written exchanges: taken from the splits of the all-to-alls inside, and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from moetrace_schemas.enums import Phase

from .conftest import Recording

Make = Callable[..., Recording]
SENT, RECEIVED = [3, 0, 2, 1], [1, 1, 4, 1]


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    """Rank 2 of four; the others are made up, and exchanges return at once."""
    distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any = None) -> torch.Tensor:
    """One all-to-all as people write it."""
    result = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(result, rows, received, sent, group=group)
    return result


def dispatch(hidden: torch.Tensor) -> torch.Tensor:
    """Sizes first, then ids, then hidden states."""
    sizes = torch.tensor(SENT)
    distributed.all_to_all_single(torch.empty_like(sizes), sizes)
    exchange(torch.zeros(sum(SENT), dtype=torch.int64), SENT, RECEIVED)
    return exchange(hidden, SENT, RECEIVED)


def combine(hidden: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return exchange(hidden, RECEIVED, SENT)


def run(recording: Recording, **parts: Any) -> Any:
    """One recorded step of wrapped dispatch, experts and combine; its record."""

    def experts(hidden: torch.Tensor) -> torch.Tensor:
        recording.time.advance(5)
        return hidden

    wrapped = recording.tracer.wrap(layer=3, experts=experts, **parts)

    def part(name: str, given: torch.Tensor) -> torch.Tensor:
        recording.time.advance(1)
        return getattr(wrapped, name)(given) if hasattr(wrapped, name) else given

    with recording.tracer.step():
        part("combine", part("experts", part("dispatch", torch.zeros(sum(SENT), 8))))
        recording.time.advance(1)
    (record,) = recording.records()
    assert recording.tracer.guard.errors == {}
    return record


def test_rows_and_bytes_are_those_of_the_payloads_splits(record: Make) -> None:
    """Per destination and in all, both ways; neither the sizes nor the ids are taken for rows."""
    step = run(record(rank=2, world_size=4), dispatch=dispatch, combine=combine)
    assert {(row.layer, row.phase): (row.row_bytes, list(row.rows)) for row in step.traffic} == {
        (3, Phase.DISPATCH): (32, SENT),
        (3, Phase.COMBINE): (32, RECEIVED),
    }
    rows = {row.phase: row.rows for row in step.phases if row.rows >= 0}
    assert rows == {Phase.DISPATCH: 6, Phase.EXPERT_GEMM: 7, Phase.COMBINE: 7}
    assert step.violations == ()


def test_a_payload_in_pieces_adds_up(record: Make) -> None:
    """Two halves of the hidden states are rows of one exchange."""

    def halves(hidden: torch.Tensor) -> torch.Tensor:
        exchange(hidden[:3], [1, 0, 1, 1], [1, 0, 2, 0])
        exchange(hidden[3:], [2, 0, 1, 0], [0, 1, 2, 1])
        return hidden.new_zeros(sum(RECEIVED), 8)

    step = run(record(rank=2, world_size=4), dispatch=halves)
    assert [list(row.rows) for row in step.traffic] == [SENT]


def test_what_does_not_say_its_rows_is_left_open(record: Make) -> None:
    """Equal parts without splits, and an exchange in a group that is not the expert-parallel one."""

    def equal(hidden: torch.Tensor) -> torch.Tensor:
        distributed.all_to_all_single(torch.empty(8, 8), torch.zeros(8, 8))
        return hidden

    assert run(record(rank=2, world_size=4), dispatch=equal).traffic == ()
    pair = distributed.new_group([2, 3])
    told = record(rank=2, world_size=4)
    told.tracer.set_expert_parallel(2, 4, 0)
    step = run(told, dispatch=lambda hidden: exchange(hidden, [4, 2], [1, 1], pair))
    assert step.traffic == ()


def test_an_exchange_outside_of_wrapped_code_is_of_no_layer(record: Make) -> None:
    """Rows are noted inside a wrapped dispatch or combine only."""
    recording = record(rank=2, world_size=4)
    wrapped = recording.tracer.wrap(layer=3, dispatch=dispatch)
    with recording.tracer.step():
        exchange(torch.zeros(sum(SENT), 64), SENT, RECEIVED)
        wrapped.dispatch(torch.zeros(sum(SENT), 8))
        exchange(torch.zeros(sum(SENT), 64), SENT, RECEIVED)
    assert [(row.row_bytes, list(row.rows)) for row in recording.records()[0].traffic] == [(32, SENT)]
