"""fairscale's MOELayer on gloo ranks, forward and backward."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]


def test_layers_show_both_exchanges_and_count_what_arrives() -> None:
    """Experts are called one by one between the exchanges; the einsums around them are glue."""
    python = interpreter("fairscale", "fairscale")
    for rank in reports(run_case(python, "gshard_layers", "fairscale", ranks=2)):
        assert rank["adapters"] == ["fairscale"]
        assert rank["layers"] == [0, 1]
        assert rank["sequences"] == [
            "router permute dispatch dispatch! dispatch permute expert_gemm permute expert_gemm "
            "unpermute combine combine! combine unpermute"
        ]
        assert rank["backward"] == [
            "unpermute combine combine! combine unpermute expert_gemm permute dispatch dispatch! dispatch "
            "permute router"
        ]
        assert rank["kinds"] == ["routed"]


def test_compiled_layers_show_the_same_phases_and_counts() -> None:
    """A layer is one graph, with its exchanges and those of its backward."""
    python = interpreter("fairscale", "fairscale")
    for rank in reports(run_case(python, "gshard_layers", "fairscale", "compiled", ranks=2)):
        assert (rank["graph_breaks"], rank["kinds"]) == ([0, 0], ["routed"])
        assert rank["graphs"] > 0, "nothing was compiled"
        assert rank["sequences"] == [
            "router permute dispatch dispatch! dispatch permute expert_gemm permute expert_gemm "
            "unpermute combine combine! combine unpermute"
        ]
        assert rank["backward"] == [
            "unpermute combine combine! combine unpermute expert_gemm permute expert_gemm permute "
            "dispatch dispatch! dispatch permute router"
        ]
