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


@pytest.mark.parametrize("ranks", SEQUENCES)
def test_dropless_layers_show_the_same(ranks: int) -> None:
    """DMoE with grouped experts: another class and another product, the same phases and exact counts."""
    python = interpreter("megablocks", "megablocks")
    for rank in reports(run_case(python, "megablocks_layers", "dropless", ranks=ranks)):
        assert rank["adapters"] == ["megablocks"]
        assert rank["sequences"] == [SEQUENCES[ranks]]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])


COMPILED = {
    1: SEQUENCES[1],
    2: SEQUENCES[2].replace("combine!", "combine combine! combine"),
}
"""Between graphs the exchange back is called by its own code, which runs before and behind the exchange."""


@pytest.mark.parametrize("ranks", COMPILED)
def test_compiled_layers_show_the_same_phases_and_counts(ranks: int) -> None:
    """Sizes that the host must know break the graphs, traced or not; phases and counts stay the same."""
    python = interpreter("megablocks", "megablocks")
    for rank in reports(run_case(python, "megablocks_layers", "compiled", ranks=ranks)):
        assert rank["graphs"] > 0, "nothing was compiled"
        assert rank["sequences"] == [COMPILED[ranks]]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
        assert rank["graph_breaks"][0] > 0
