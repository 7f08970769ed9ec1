"""Megatron-Core's own MoELayer on gloo ranks, both directions; cases/megatron.py says what is replaced."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]

# `!` is an exchange. The all-to-all dispatcher gathers counts, sends rows and sends their weights.
TO_EXPERTS = "router permute dispatch! permute dispatch dispatch! dispatch dispatch! dispatch permute"
FROM_EXPERTS = "unpermute combine combine! combine unpermute"
OVERLAPPED = (
    "router permute dispatch! permute shared_expert permute dispatch dispatch! dispatch dispatch! dispatch "
    "permute shared_expert permute expert_gemm unpermute combine combine! combine unpermute "
    "shared_expert unpermute shared_expert unpermute shared_expert unpermute"
)
CASES = {
    ("alltoall", "none", 2): f"{TO_EXPERTS} expert_gemm {FROM_EXPERTS}",
    ("alltoall", "plain", 2): f"shared_expert permute {TO_EXPERTS} expert_gemm {FROM_EXPERTS}",
    ("alltoall", "overlap", 2): OVERLAPPED,
    # The all-gather dispatcher gathers ids, weights and rows, and permutes behind that.
    (
        "allgather",
        "none",
        2,
    ): "router permute dispatch dispatch! dispatch dispatch! dispatch dispatch! dispatch "
    f"permute expert_gemm {FROM_EXPERTS}",
    ("alltoall", "none", 1): "router permute expert_gemm unpermute",
}

BACKWARD = {
    ("alltoall", "none", 2): "unpermute combine combine! combine unpermute expert_gemm permute dispatch "
    "dispatch! dispatch dispatch! dispatch permute router"
}


@pytest.mark.parametrize(("dispatcher", "shared", "ranks"), CASES)
def test_layers_show_the_dispatchers_phases_and_exact_counts(
    dispatcher: str, shared: str, ranks: int
) -> None:
    """Counts routed and received are exact, results keep their bits, everything is restored."""
    python = interpreter("megatron", "megatron.core")
    found = reports(run_case(python, "megatron", dispatcher, shared, ranks=ranks))
    for rank in found:
        assert rank["adapters"] == ["megatron"]
        assert rank["layers"] == [0, 1], "layer numbers of the framework, counted from 0"
        assert rank["sequences"] == [CASES[dispatcher, shared, ranks]]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
    if (dispatcher, shared, ranks) in BACKWARD:
        assert {name for rank in found for name in rank["backward"]} == {BACKWARD[dispatcher, shared, ranks]}
    if dispatcher == "alltoall" and ranks > 1:
        _check_traffic(found)


def test_compiled_routers_and_experts_show_the_same_phases_and_counts() -> None:
    """Its dispatchers call CUDA streams, whose stand-ins cannot be traced: they stay as they are."""
    python = interpreter("megatron", "megatron.core")
    (rank,) = reports(run_case(python, "megatron", "alltoall", "none", "compiled"))
    assert rank["graphs"] > 0, "nothing was compiled"
    assert rank["sequences"] == [CASES["alltoall", "none", 1]]
    assert rank["kinds"] == ["routed"]


def _check_traffic(found: list[dict[str, object]]) -> None:
    """What a rank sends is what the other one receives, and comes back the same way."""
    sent = [{tuple(row[:2]): row[3] for row in rank["traffic"]} for rank in found]  # type: ignore[attr-defined]
    for layer in (0, 1):
        for one, other in ((0, 1), (1, 0)):
            assert sent[one][layer, "dispatch"][other] == sent[other][layer, "combine"][one]
    # Counts are gathered in front of the rows, and weights are sent behind them.
    for rank, moved in zip(found, sent, strict=True):
        assert rank["exchanged"] == [
            [layer, phase, rows]
            for layer in (0, 1)
            for phase, rows in (
                ("dispatch", -1),
                ("dispatch", sum(moved[layer, "dispatch"])),
                ("dispatch", -1),
                ("combine", sum(moved[layer, "combine"])),
            )
        ]
