"""Two real ranks with expert parallelism over gloo: counts and traffic are exact, up to the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.collector_process import collector, rows
from moetrace_schemas.columns import RowFlag
from transformers_there import transformers_or_skip

pytestmark = pytest.mark.multirank
transformers_or_skip(whole_module=True)

RANKS = 2
WORKER = Path(__file__).with_name("expert_parallel_worker.py")
CASES = (
    *(
        f"{model}:{mode}"
        for model in ("olmoe", "qwen3", "mixtral", "deepseek_v3")
        for mode in ("inference", "training")
    ),
    "olmoe:checkpointed",
)
every_case = pytest.mark.parametrize("case", CASES)
Case = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks and their collector write."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    """Every case as each rank saw it; what they sent is stored when this returns."""
    with collector(folder / "run") as service:
        seen = run_ranks(folder, service.http_address)
        assert service.terminate() == 0
    return {case: [rank[case] for rank in seen] for case in CASES}


def run_ranks(folder: Path, endpoint: str) -> list[dict[str, Case]]:
    """Run all cases on all ranks; what each rank wrote down."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, WORKER, str(rank), str(RANKS)),
                *(folder / "rendezvous", outputs[rank], endpoint, *CASES),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        logs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(logs)
    return [json.loads(output.read_text()) for output in outputs]


@every_case
def test_counts_in_the_store_are_the_routers_own_choices(
    cases: dict[str, Case], folder: Path, case: str
) -> None:
    """Per rank, step, layer and expert, after the wire, the join and the store; padding is left out."""
    stored = rows(
        folder / "run",
        "SELECT rank, step, layer, groupArray(count) AS counts FROM (SELECT * FROM expert_loads FINAL "
        f"WHERE run_id = '{case}' AND count_kind = 'routed' ORDER BY expert) GROUP BY rank, step, layer",
    )
    found = {(int(r["rank"]), int(r["step"]), int(r["layer"])): [int(c) for c in r["counts"]] for r in stored}
    expected = {
        (rank, number, layer): step["expected"][f"{layer} routed"]
        for rank, seen in enumerate(cases[case])
        for number, step in enumerate(seen["steps"])
        for layer in seen["layers"]
    }
    assert found == expected
    assert [rank["sent"] for rank in cases[case]] == [3, 3]


def steps(ranks: Case) -> list[list[dict[str, Any]]]:
    """Step by step, what each rank recorded."""
    return list(zip(*(rank["steps"] for rank in ranks), strict=True))  # type: ignore[arg-type]


@every_case
def test_numbers_are_bit_identical_with_tracing(cases: dict[str, Case], case: str) -> None:
    """Logits, and in training the loss and every gradient on every rank."""
    for rank in cases[case]:
        assert rank["bit_identical"] == [True, True, True]
        assert all(count > (1 if case.endswith("inference") else 20) - 1 for count in rank["tensors"])
        assert rank["errors"] == {}


@every_case
def test_routed_counts_are_the_routers_own_choices(cases: dict[str, Case], case: str) -> None:
    """Per layer and expert, with padding left out of `routed` and told apart."""
    for rank in cases[case]:
        assert len(rank["steps"]) == 3
        for step in rank["steps"]:
            for name, counts in step["expected"].items():
                assert step["counts"].get(name, [0] * len(counts)) == counts, name
            assert any(sum(counts) for name, counts in step["counts"].items() if name.endswith("padding"))
            assert not any(name.endswith("invalid") for name in step["counts"])


@every_case
def test_rows_sent_to_a_rank_are_the_rows_that_it_received(cases: dict[str, Case], case: str) -> None:
    """Summed over the senders, per layer and destination; the GEMM works on exactly those rows."""
    for step in steps(cases[case]):
        for layer in cases[case][0]["layers"]:
            for destination, receiver in enumerate(step):
                sent = sum(sender["traffic"][f"{layer} dispatch"][destination] for sender in step)
                received = sum(receiver["counts"][f"{layer} received"])
                returned = sum(receiver["traffic"][f"{layer} combine"])
                (worked_on,) = [
                    row[5] for row in receiver["rows"] if row[:3] == [layer, "expert_gemm", "forward"]
                ]
                assert sent == received == returned == worked_on


@every_case
def test_what_an_expert_received_is_what_all_ranks_routed_to_it(cases: dict[str, Case], case: str) -> None:
    """Per logical expert: routed and padding pairs of all ranks, on the rank that holds the expert."""
    for step in steps(cases[case]):
        for layer in cases[case][0]["layers"]:
            experts = range(cases[case][0]["num_experts"])
            routed = [
                sum(
                    rank["expected"][f"{layer} {kind}"][expert]
                    for rank in step
                    for kind in ("routed", "padding")
                )
                for expert in experts
            ]
            received = [rank["counts"][f"{layer} received"] for rank in step]
            assert [sum(counts[expert] for counts in received) for expert in experts] == routed
            half = len(experts) // RANKS
            for rank, counts in enumerate(received):
                elsewhere = counts[:half] if rank else counts[half:]
                assert not any(elsewhere)


@every_case
def test_every_layer_shows_its_phases_and_barriers_on_every_rank(cases: dict[str, Case], case: str) -> None:
    """Count exchange, payload exchange and combine are barriers, in the same number on all ranks."""
    for step in steps(cases[case]):
        for rank in step:
            for layer in cases[case][0]["layers"]:
                forward = [row for row in rank["rows"] if row[0] == layer and row[2] == "forward"]
                barriers = [row[1] for row in forward if row[3] & RowFlag.BARRIER]
                assert barriers == ["dispatch", "dispatch", "combine"]
                assert {row[1] for row in forward} >= {
                    "outside",
                    "router",
                    "permute",
                    "expert_gemm",
                    "unpermute",
                }
            assert sum(row[4] for row in rank["rows"]) == rank["duration"]


@every_case
def test_the_payload_exchange_carries_rows_and_bytes(cases: dict[str, Case], case: str) -> None:
    """The second dispatch of a layer moves the rows; its bytes are rows times their size."""
    for rank in cases[case]:
        for step in rank["steps"]:
            (row_bytes,) = step["row_bytes"]
            for layer in rank["layers"]:
                barriers = [
                    row
                    for row in step["rows"]
                    if row[0] == layer and row[2] == "forward" and row[3] & RowFlag.BARRIER
                ]
                counts, payload, combine = barriers
                assert counts[5:] == [-1, -1]
                for barrier, name in ((payload, "dispatch"), (combine, "combine")):
                    rows = sum(step["traffic"][f"{layer} {name}"])
                    assert barrier[5:] == [rows, rows * row_bytes]


def barriers(rows: list[Any], *, recompute: bool) -> list[str]:
    """Phases of the barriers among rows, in order."""
    return [
        row[1] for row in rows if row[3] & RowFlag.BARRIER and bool(row[3] & RowFlag.RECOMPUTE) == recompute
    ]


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(":inference")])
def test_every_layer_shows_its_backward_on_every_rank(cases: dict[str, Case], case: str) -> None:
    """Combine, experts and dispatch in that order, and the same barriers on all ranks."""
    for step in steps(cases[case]):
        for rank in step:
            for layer in cases[case][0]["layers"]:
                rows = [row for row in rank["rows"] if row[0] == layer and row[2] == "backward"]
                own = [row for row in rows if not row[3] & RowFlag.RECOMPUTE]
                order = [row[1] for row in own if row[1] in ("combine", "expert_gemm", "dispatch")]
                assert list(dict.fromkeys(order)) == ["combine", "expert_gemm", "dispatch"]
                assert barriers(rows, recompute=False) == ["combine", "dispatch"]


def test_recompute_is_told_apart_from_the_forward(cases: dict[str, Case]) -> None:
    """With checkpointing, layers show again as backward, and their pairs under a kind of their own."""
    for rank in cases["olmoe:checkpointed"]:
        for step in rank["steps"]:
            for layer in rank["layers"]:
                backward = [row for row in step["rows"] if row[0] == layer and row[2] == "backward"]
                again = [row for row in backward if row[3] & RowFlag.RECOMPUTE]
                assert {row[1] for row in again} >= {"router", "dispatch", "expert_gemm"}
                assert barriers(backward, recompute=False) == ["combine", "dispatch"]
                routed = sum(sum(step["expected"][f"{layer} {kind}"]) for kind in ("routed", "padding"))
                assert step["counts"][f"{layer} recompute"] == [routed]
            assert not any(row[3] & RowFlag.ERROR for row in step["rows"])


@every_case
def test_the_position_in_the_expert_parallel_group_comes_from_the_model(
    cases: dict[str, Case], case: str
) -> None:
    """Nobody had to say it, and every expected call site fired."""
    assert [rank["ep"] for rank in cases[case]] == [[0, RANKS, 0], [1, RANKS, 0]]
    for rank in cases[case]:
        assert rank["coverage"][1] > 0


@every_case
def test_no_receipt_contradicts_itself(cases: dict[str, Case], folder: Path, case: str) -> None:
    """Real routers, dispatchers and experts of two ranks: nothing was counted, by rank or by group."""
    assert all(step["violations"] == [] for rank in cases[case] for step in rank["steps"])
    assert rows(folder / "run", "SELECT * FROM routing_violations FINAL") == []


@every_case
def test_coverage_and_pairs_of_experts_arrive(cases: dict[str, Case], folder: Path, case: str) -> None:
    """Each rank's call sites, all of which fired; and pairs that are those of the routers' own choices.

    A sample that comes while the last one is being read is left out, so not every step need have one.
    """
    found = rows(
        folder / "run",
        f"SELECT DISTINCT expected_sites, seen_sites FROM rank_steps FINAL WHERE run_id = '{case}'",
    )
    assert found
    assert all(row["expected_sites"] == row["seen_sites"] > 0 for row in found)
    stored = rows(
        folder / "run",
        "SELECT rank, step, layer, first, second, tokens FROM expert_coactivation FINAL "
        f"WHERE run_id = '{case}' AND span = 'within'",
    )
    pairs = {
        (r["rank"], int(r["step"]), r["layer"], r["first"], r["second"]): int(r["tokens"]) for r in stored
    }
    sampled = {pair[:2] for pair in pairs}
    assert {(0, 0), (1, 0)} <= sampled
    assert pairs == {
        (rank, number, int(layer), first, second): tokens
        for rank, seen in enumerate(cases[case])
        for number, step in enumerate(seen["steps"])
        if (rank, number) in sampled
        for layer, first, second, tokens in step["pairs"]
    }
