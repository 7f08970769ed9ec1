"""torchtitan's MoE layer on gloo ranks, both directions, with its local and its all-to-all dispatcher."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]

# Exchanges of counts and of rows return at launch; each lasts until the wait for it.
SEQUENCES = {
    1: "router permute expert_gemm unpermute shared_expert",
    2: "router permute dispatch! permute dispatch! permute expert_gemm unpermute combine! unpermute "
    "shared_expert",
}

BACKWARD = {
    1: "shared_expert unpermute expert_gemm permute router",
    2: "shared_expert unpermute combine! unpermute expert_gemm permute dispatch! permute router",
}


@pytest.mark.parametrize("ranks", SEQUENCES)
def test_layers_show_the_dispatchers_exchanges_and_exact_counts(ranks: int) -> None:
    """Counts routed and received are exact, results keep their bits, everything is restored."""
    python = interpreter("torchtitan", "torchtitan")
    for rank in reports(run_case(python, "torchtitan_layers", ranks=ranks)):
        assert rank["adapters"] == ["torchtitan"]
        assert rank["sequences"] == [SEQUENCES[ranks]]
        assert rank["backward"] == [BACKWARD[ranks]]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
        assert bool(rank["traffic"]) == (ranks > 1)


@pytest.mark.parametrize("ranks", SEQUENCES)
def test_compiled_layers_show_the_same_phases_and_counts(ranks: int) -> None:
    """A graph per layer, as torchtitan compiles; with an exchange its split sizes break it, traced or not."""
    python = interpreter("torchtitan", "torchtitan")
    for rank in reports(run_case(python, "torchtitan_layers", "compiled", ranks=ranks)):
        assert rank["graphs"] > 0, "nothing was compiled"
        assert rank["sequences"] == [SEQUENCES[ranks]]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
        plain, traced = rank["graph_breaks"]
        if ranks == 1:
            assert (plain, traced) == (0, 0)
            assert rank["backward"] == [BACKWARD[1]]
        else:
            assert plain > 0
