"""Models that data parallelism wraps, before and after they are instrumented: two real gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.rank_processes import run_ranks
from transformers_there import transformers_or_skip

transformers_or_skip(whole_module=True)

RANKS = 2
CASES = ("ddp:before", "ddp:after", "fsdp2:before", "fsdp2:after")
WORKER = Path(__file__).with_name("wrapped_model_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("wrapped")
    outputs = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
    run_ranks(
        WORKER,
        [(str(rank), str(RANKS), folder / "rendezvous", outputs[rank], *CASES) for rank in range(RANKS)],
        timeout_s=240,
    )
    return [json.loads(output.read_text()) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_same_bits(ranks: list[dict[str, Any]], case: str) -> None:
    """Two training steps from the same weights, traced and not; the second sees the first one's update."""
    for rank in ranks:
        assert rank[case]["same"]
        assert rank[case]["tensors"] > 20


@pytest.mark.parametrize("case", CASES)
def test_every_layer_is_covered_and_counted(ranks: list[dict[str, Any]], case: str) -> None:
    """All wrapped call sites fire, whichever object the training loop calls, and counts are per rank."""
    for rank in ranks:
        assert rank[case]["layers"] == [0, 1]
        assert rank[case]["silent"] == []
        assert rank[case]["errors"] == {}
        assert rank[case]["violations"] == 0
        assert rank[case]["counts"] == [{"0 routed": 24, "1 routed": 24}] * 2


@pytest.mark.parametrize("case", CASES)
def test_nothing_stays_wrapped(ranks: list[dict[str, Any]], case: str) -> None:
    """Shutdown finds every callable again."""
    assert [rank[case]["left"] for rank in ranks] == [[], []]
