"""Rows of hand-written exchanges: taken from the splits of the all-to-alls inside, and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_models import Decoder
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
    assert {row.rows for row in step.phases if row.phase is Phase.DISPATCH} == {-1}


@pytest.mark.parametrize("says", [True, False])
def test_what_goes_behind_the_payload_is_not_taken_for_it(record: Make, says: bool) -> None:
    """Weights may follow the hidden states: their exchange is not the one that moved the rows."""

    def weights_last(hidden: torch.Tensor) -> torch.Tensor:
        result, weights = exchange(hidden, SENT, RECEIVED), torch.zeros(sum(SENT), *(1,) * says)
        exchange(weights, SENT, RECEIVED)
        return result

    step = run(record(rank=2, world_size=4), dispatch=weights_last)
    assert [(row.row_bytes, list(row.rows)) for row in step.traffic] == [(32, SENT)]
    assert {row.rows for row in step.phases if row.phase is Phase.DISPATCH} == {-1}
    assert [row.rows for row in step.phases if row.phase is Phase.EXPERT_GEMM] == [sum(RECEIVED)]


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


@pytest.mark.parametrize("widths", [(8, 8), (8, 16)], ids=["equal", "of two sizes"])
def test_two_exchanges_in_a_step_are_not_the_last_one(record: Make, widths: tuple[int, int]) -> None:
    """Two microbatches: the step's rows are known where they add up, those of one exchange never."""
    recording = record(rank=2, world_size=4)
    wrapped = recording.tracer.wrap(layer=3, dispatch=dispatch)
    with recording.tracer.step():
        for width in widths:
            wrapped.dispatch(torch.zeros(sum(SENT), width))
            recording.time.advance(1)
    (step,) = recording.records()
    assert {row.rows for row in step.phases} == {-1}
    total = [2 * rows for rows in SENT] if widths[0] == widths[1] else SENT
    assert [(row.row_bytes, list(row.rows)) for row in step.traffic] == [(32, total)]


def test_an_exchange_of_another_thread_keeps_its_rows(record: Make) -> None:
    """A wrapped call that ends beside it is not taken for it."""
    recording, has_sent, go_on = record(rank=2, world_size=4), Event(), Event()
    recording.tracer.set_expert_parallel(2, 4, 0)

    def slow(hidden: torch.Tensor) -> torch.Tensor:
        result = exchange(hidden, SENT, RECEIVED)
        has_sent.set()
        assert go_on.wait(10)
        return result

    first = recording.tracer.wrap(layer=3, dispatch=slow)
    other = recording.tracer.wrap(layer=5, combine=lambda hidden: hidden)
    with recording.tracer.step():
        thread = Thread(target=first.dispatch, args=(torch.zeros(sum(SENT), 8),))
        thread.start()
        assert has_sent.wait(10)
        other.combine(torch.zeros(1, 8))
        go_on.set()
        thread.join()
    (step,) = recording.records()
    assert [(row.layer, row.phase, list(row.rows)) for row in step.traffic] == [(3, Phase.DISPATCH, SENT)]


def test_a_torch_that_numbers_no_backward_costs_no_rows(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in for that name elsewhere does so here."""
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    step = run(record(rank=2, world_size=4), dispatch=dispatch)
    assert [list(row.rows) for row in step.traffic] == [SENT]


def test_wrapped_functions_show_their_rows_when_a_model_is_taken_out(record: Make) -> None:
    """They stay wrapped, and so do the all-to-alls inside, until all is taken out."""
    recording, model, plain = record(rank=2, world_size=4), Decoder(), distributed.all_to_all_single
    wrapped = recording.tracer.wrap(layer=3, dispatch=dispatch)
    recording.tracer.instrument(model)
    recording.tracer.uninstrument(model)
    with recording.tracer.step():
        wrapped.dispatch(torch.zeros(sum(SENT), 8))
    (step,) = recording.records()
    assert [list(row.rows) for row in step.traffic] == [SENT]
    assert distributed.all_to_all_single is plain
