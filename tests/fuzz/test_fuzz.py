"""A bounded number of damaged inputs on every run of the tests; `run.py` makes as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fuzz.mutation import mutate
from fuzz.run import Tally, fuzz
from fuzz.targets import Share, Target, all_targets
from fuzz.wire_targets import ColumnsTarget, OtlpBodyTarget, spans_of
from moetrace_collectors.receivers.wire_budget import (
    TooDeepError,
    TooManyMessagesError,
    WireError,
    check_budget,
)

FAST, SLOW = 300, 60
ENGINE = "sql in the engine"
SHARES = [share for share in all_targets() if share.target.name != ENGINE]
BODIES = [seed[1:] for seed in OtlpBodyTarget().seeds if seed[:1] == b"p"]


@pytest.mark.parametrize("share", SHARES, ids=[share.target.name for share in SHARES])
def test_damaged_inputs_are_refused_and_counted(share: Share) -> None:
    """Valid inputs, damaged by chance, end in an answer or a declared refusal; nothing hangs."""
    tally = fuzz(share.target, SLOW if share.slow else FAST, seed=1)
    assert [trace for _, trace in tally.failures] == []
    assert len(tally.outcomes) >= 2, "every input had the same fate: nothing was fuzzed"


@pytest.mark.parametrize(
    "target",
    [share.target for share in SHARES if not share.slow],
    ids=[share.target.name for share in SHARES if not share.slow],
)
def test_noise_is_refused(target: Target) -> None:
    """Bytes of no meaning, chosen and shrunk by hypothesis, end in a declared outcome."""

    @settings(max_examples=60, deadline=None, database=None)
    @given(data=st.binary(max_size=400))
    def check(data: bytes) -> None:
        target.run(data)

    check()


def test_damaged_statements_in_the_engine_only_read() -> None:
    """In a process of its own, since one process opens one engine: refused, or answered without a change."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run.py")), "--only", ENGINE, "--inputs", "100"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{ENGINE}: 100 inputs")


@settings(max_examples=300, deadline=None, database=None)
@given(seed=st.integers(0, 2**32))
def test_the_budget_counts_what_the_parser_builds(seed: int) -> None:
    """What passes the budget has exactly the spans that protobuf sees, or does not parse at all."""
    rng = Random(seed)
    body = mutate(rng.choice(BODIES), rng, BODIES)
    try:
        counted = check_budget(body, max_spans=50)
    except (TooManyMessagesError, TooDeepError, WireError):
        return
    assert spans_of(body) in (counted, None)


def test_a_failure_and_a_hang_are_found() -> None:
    """The fuzzer itself: what raises, and what takes too long, is kept with its input."""

    class Broken:
        name = "broken"
        seeds = (b"good", b"bad", b"long")
        documents = ()

        def run(self, data: bytes) -> str:
            if data == b"bad":
                raise KeyError(data)
            while data == b"long":
                pass
            return "ok"

    tally: Tally = fuzz(Broken(), 3, seed=0, limit_s=0.05)
    assert [data for data, _ in tally.failures] == [b"bad", b"long"]
    assert dict(tally.outcomes) == {"ok": 1, "FAILED: KeyError": 1, "FAILED: HangError": 1}


def test_columns_that_claim_more_than_they_hold_are_refused() -> None:
    """A count of rows in the header is believed only when the bytes are there."""
    target = ColumnsTarget("phases")
    block = bytearray(target.seeds[0])
    block[8:12] = (2**32 - 1).to_bytes(4, "little")
    assert target.run(bytes(block)) == "refused: malformed_columns"
    assert Span.DESCRIPTOR.fields_by_name["attributes"].number == 9
