"""A rank without requests keeps the others company: its batches are no load, its experts' work is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.collector_process import collector, rows
from integration.idle_rank_worker import EXPERTS, PLAN, RANKS, RUN, TOP_K
from integration.rank_processes import run_ranks

pytestmark = pytest.mark.multirank

WORKER = Path(__file__).with_name("idle_rank_worker.py")
HALF = EXPERTS // RANKS
Counts = list[int]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's store."""
    return tmp_path_factory.mktemp("idle") / "run"


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each rank wrote down; what both sent is stored when this returns."""
    outputs = [directory.parent / f"rank-{rank}.json" for rank in range(RANKS)]
    with collector(directory) as service:
        rendezvous = directory.parent / "rendezvous"
        run_ranks(
            WORKER,
            [(str(rank), rendezvous, outputs[rank], service.http_address) for rank in range(RANKS)],
            timeout_s=120,
        )
        assert service.terminate() == 0
    found = [json.loads(output.read_text()) for output in outputs]
    assert [(rank["errors"], rank["sent"]) for rank in found] == [({}, len(PLAN))] * RANKS
    return found


def chosen(ranks: list[dict[str, Any]], step: int, rank: int, *, real: bool) -> Counts:
    """Pairs per expert that the router of a rank chose in its real batches of a step, or in all."""
    before = sum(len(of_ranks[rank]) for of_ranks in PLAN[:step])
    batches = PLAN[step][rank]
    kept = [
        ranks[rank]["chosen"][before + at] for at, (dummy, _) in enumerate(batches) if not (real and dummy)
    ]
    return [sum(column) for column in zip(*kept, strict=True)] if kept else [0] * EXPERTS


def received(ranks: list[dict[str, Any]], step: int, rank: int) -> Counts:
    """Rows per expert that the experts of a rank are due, of all batches of both ranks."""
    due = [chosen(ranks, step, source, real=False) for source in range(RANKS)]
    here = range(rank * HALF, (rank + 1) * HALF)
    return [sum(of_rank[expert] for of_rank in due) if expert in here else 0 for expert in range(EXPERTS)]


@pytest.mark.parametrize("step", range(len(PLAN)))
def test_experts_of_an_idle_rank_show_what_they_did_for_others(
    ranks: list[dict[str, Any]], step: int
) -> None:
    """On both ranks, to the row: whoever was idle, and also where a dummy batch ran in an open step."""
    for rank in range(RANKS):
        assert ranks[rank]["steps"][step]["counts"]["received"] == received(ranks, step, rank)
    sent = [ranks[rank]["steps"][step]["sent"]["dispatch"] for rank in range(RANKS)]
    assert [sum(column) for column in zip(*sent, strict=True)] == [
        sum(received(ranks, step, rank)) for rank in range(RANKS)
    ]


@pytest.mark.parametrize("step", range(len(PLAN)))
def test_what_a_dummy_batch_routes_is_no_load(ranks: list[dict[str, Any]], step: int) -> None:
    """One total where the step is one, nothing where it ran in a step of other batches."""
    for rank in range(RANKS):
        counts = dict(ranks[rank]["steps"][step]["counts"])
        del counts["received"]
        if [dummy for dummy, _ in PLAN[step][rank]] == [True]:
            ((_, tokens),) = PLAN[step][rank]
            assert counts == {"dummy": [TOP_K * tokens]}
        else:
            assert counts == {"routed": chosen(ranks, step, rank, real=True)}


def test_an_idle_rank_is_no_contradiction(ranks: list[dict[str, Any]], directory: Path) -> None:
    """Every step was checked, by each rank and over the group."""
    assert [step["violations"] for rank in ranks for step in rank["steps"]] == [[]] * RANKS * len(PLAN)
    assert rows(directory, "SELECT * FROM routing_violations FINAL") == []


def test_an_idle_rank_counts_into_the_balance_of_ranks(ranks: list[dict[str, Any]], directory: Path) -> None:
    """In the store: tokens are those of the real batches, rows those of all experts."""
    stored = rows(
        directory,
        "SELECT step, tokens, rank_max_mean_ratio AS ratio FROM v_layer_loads "
        f"WHERE run_id = '{RUN}' ORDER BY step",
    )
    assert [int(str(row["step"])) for row in stored] == list(range(len(PLAN)))
    for step, row in enumerate(stored):
        assert int(str(row["tokens"])) == sum(
            sum(chosen(ranks, step, rank, real=True)) for rank in range(RANKS)
        )
        work = [sum(received(ranks, step, rank)) for rank in range(RANKS)]
        assert float(str(row["ratio"])) == pytest.approx(max(work) * RANKS / sum(work))
