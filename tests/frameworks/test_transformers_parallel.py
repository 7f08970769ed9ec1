"""transformers 5 with experts spread over gloo ranks, both directions."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]

# Counts are exchanged before rows; the exchange of rows returns at launch.
EXCHANGED = (
    "router permute dispatch! permute dispatch dispatch! permute expert_gemm "
    "unpermute combine combine! unpermute"
)
SUMMED = "router permute expert_gemm unpermute combine! unpermute"
CASES = {
    ("mixtral", "all_to_all"): EXCHANGED,
    ("gpt_oss", "all_to_all"): EXCHANGED,
    ("deepseek_v3", "all_to_all"): f"{EXCHANGED} shared_expert",
    ("qwen3_moe", "all_reduce"): SUMMED,
}


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_layers_show_the_exchange_and_exact_counts(family: str, implementation: str) -> None:
    """Counts routed and received are exact, results keep their bits, everything is restored."""
    python = interpreter("transformers5", "transformers.distributed.expert_parallel")
    for rank in reports(run_case(python, "transformers_parallel", family, implementation, ranks=2)):
        assert rank["adapters"] == ["transformers"]
        assert rank["sequences"] == [CASES[family, implementation]]
        exchanged = implementation == "all_to_all"
        assert rank["kinds"] == (["received", "routed"] if exchanged else ["routed"])
        assert bool(rank["traffic"]) == exchanged
