"""Identity without talking: the same ids and decisions on every rank, in every version, for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_schemas.identity import RUN_ID_PATTERN, is_sampled, span_id, trace_id

run_ids = st.from_regex(RUN_ID_PATTERN, fullmatch=True)
steps = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(
    ("run_id", "step", "trace"),
    [
        ("run-7", 0, "d2fa15a1fa4a043dc83c7cf72899d589"),
        ("run-7", 1, "129d6e22588635f747ea17d674562891"),
        ("run-7", 2**63 - 1, "e966d6296036315529f1cf1ba26ff7c0"),
        ("a", 0, "74f41aa7b9a9d392fb3789aa9c6c7155"),
        ("x" * 128, 12_345, "133fcb56189a4f1d423b09178891f4b6"),
    ],
)
def test_trace_ids_are_frozen(run_id: str, step: int, trace: str) -> None:
    """Stored data of years, and ranks of different versions, must meet under one id."""
    assert f"{trace_id(run_id, step):032x}" == trace


@pytest.mark.parametrize(
    ("rank", "microbatch", "span"),
    [
        (0, 0, "b49a1be8e49f40dd"),
        (1, 0, "eb322d86c87f265c"),
        (0, 1, "680d168b2ec182a2"),
        (4095, 65_535, "eda2a2b25d562bbb"),
    ],
)
def test_span_ids_are_frozen(rank: int, microbatch: int, span: str) -> None:
    """As trace ids are."""
    assert f"{span_id(trace_id('run-7', 0), rank, microbatch):016x}" == span


def test_sampled_steps_are_frozen() -> None:
    """Ranks of different versions must pick the same steps."""
    assert [step for step in range(60) if is_sampled("run-7", step, 10)] == [16, 23, 54]


@given(run_ids, steps, st.integers(0, 2**32 - 1), st.integers(0, 65_535))
def test_ids_fit_their_size_and_are_never_zero(run_id: str, step: int, rank: int, microbatch: int) -> None:
    """OpenTelemetry forbids the all-zero id."""
    trace = trace_id(run_id, step)
    assert 0 < trace < 2**128
    assert 0 < span_id(trace, rank, microbatch) < 2**64


def test_ids_of_a_run_do_not_collide() -> None:
    """Steps, ranks and microbatches each have their own."""
    traces = {trace_id("run-7", step) for step in range(2_000)}
    assert len(traces) == 2_000
    spans = {span_id(trace_id("run-7", 0), rank, batch) for rank in range(100) for batch in range(20)}
    assert len(spans) == 2_000


def test_parts_of_an_id_do_not_run_into_each_other() -> None:
    """`ab` with step `c` is not `a` with step `bc`: parts carry their length."""
    step = int.from_bytes(b"b" + bytes(7), "little")
    assert trace_id("ab", 0) != trace_id("a", step)
    assert trace_id("run-1", 1) != trace_id("run-11", 1)


@pytest.mark.parametrize("period", [2, 10, 100])
def test_the_sampling_rate_is_about_one_in_n(period: int) -> None:
    """Over many steps, within five standard deviations of a fair draw."""
    count = 40_000
    sampled = sum(is_sampled("run-7", step, period) for step in range(count))
    deviation = (count / period * (1 - 1 / period)) ** 0.5
    assert abs(sampled - count / period) < 5 * deviation


def test_sampling_does_not_resonate_with_periodic_work() -> None:
    """Every second, fourth or tenth step (accumulation, evaluation) is sampled like any other."""
    for stride in (2, 4, 10):
        for offset in range(stride):
            sampled = sum(is_sampled("run-7", step, 10) for step in range(offset, 40_000, stride))
            assert sampled == pytest.approx(4_000 / stride, rel=0.35)


@given(run_ids, steps)
def test_a_period_of_one_samples_all_and_zero_samples_none(run_id: str, step: int) -> None:
    """The two ends of the scale are exact."""
    assert is_sampled(run_id, step, 1)
    assert not is_sampled(run_id, step, 0)


@pytest.mark.parametrize("run_id", ["", "a b", "a/b", "x" * 129, "run\n", "\u00e9"])
def test_a_run_id_that_could_not_be_a_label_or_file_name_is_none(run_id: str) -> None:
    """It becomes both."""
    assert not RUN_ID_PATTERN.fullmatch(run_id)
