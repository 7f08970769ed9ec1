"""MegaBlocks' MoE on gloo ranks, both directions; cases/megablocks_layers.py says what of it is replaced."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]

SEQUENCES = {
    1: "router permute expert_gemm unpermute",
    2: "router permute dispatch! permute dispatch! permute expert_gemm unpermute combine! unpermute",
}


@pytest.mark.parametrize("ranks", SEQUENCES)
def test_layers_show_asynchronous_exchanges_and_exact_counts(ranks: int) -> None:
    """Counts routed and received are exact, results keep their bits, everything is restored."""
    python = interpreter("megablocks", "megablocks")
    for rank in reports(run_case(python, "megablocks_layers", ranks=ranks)):
        assert rank["adapters"] == ["megablocks"]
        assert rank["sequences"] == [SEQUENCES[ranks]]
        if ranks == 1:
            assert rank["backward"] == ["unpermute expert_gemm permute router"]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
