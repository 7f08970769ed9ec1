"""OLMo-core's MoE on gloo ranks; cases/olmo_core_layers.py says what of it is replaced."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]

ALONE = "permute expert_gemm unpermute"
EXCHANGED = "permute dispatch! permute dispatch! permute expert_gemm unpermute combine! unpermute"

BACKWARD = "unpermute combine! unpermute expert_gemm permute dispatch!"


@pytest.mark.parametrize(("ranks", "experts"), [(1, ALONE), (2, EXCHANGED)])
def test_layers_show_asynchronous_exchanges_and_exact_counts(ranks: int, experts: str) -> None:
    """The second layer has a shared expert; all else is the same in both."""
    python = interpreter("olmo_core", "olmo_core")
    for rank in reports(run_case(python, "olmo_core_layers", ranks=ranks)):
        assert rank["adapters"] == ["olmo_core"]
        assert rank["sequences"] == [f"router {experts}", f"router permute shared_expert {experts}"]
        if ranks == 1:
            ending = "unpermute expert_gemm permute"
            assert rank["backward"] == [f"{ending} router", f"{ending} shared_expert router"]
        else:
            assert rank["backward"] == [
                f"{BACKWARD} permute router",
                f"{BACKWARD} permute shared_expert router",
            ]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
        assert bool(rank["traffic"]) == (ranks > 1)


@pytest.mark.parametrize(("ranks", "experts"), [(1, ALONE), (2, EXCHANGED)])
def test_compiled_layers_show_the_same_phases_and_counts(ranks: int, experts: str) -> None:
    """Sizes that the host must know break the graphs, traced or not; phases and counts stay the same."""
    python = interpreter("olmo_core", "olmo_core")
    for rank in reports(run_case(python, "olmo_core_layers", "compiled", ranks=ranks)):
        assert rank["graphs"] > 0, "nothing was compiled"
        assert rank["sequences"] == [f"router {experts}", f"router permute shared_expert {experts}"]
        assert rank["kinds"] == (["received", "routed"] if ranks > 1 else ["routed"])
        assert rank["graph_breaks"][0] > 0


WITH_CAPACITY = "permute dispatch! permute expert_gemm unpermute combine! unpermute"
"""Each expert gets as many rows of every rank: there are no sizes to exchange first."""


@pytest.mark.parametrize(("ranks", "experts"), [(1, ALONE), (2, WITH_CAPACITY)])
def test_layers_with_a_capacity_count_admitted_and_dropped(ranks: int, experts: str) -> None:
    """Pairs beyond an expert's places are no load and are counted apart, exactly; results keep their bits."""
    python = interpreter("olmo_core", "olmo_core")
    found = reports(run_case(python, "olmo_core_layers", "capacity", ranks=ranks))
    for rank in found:
        assert rank["adapters"] == ["olmo_core"]
        assert rank["sequences"] == [f"router {experts}", f"router permute shared_expert {experts}"]
        assert rank["kinds"] == ["dropped", "routed"]
    assert sum(rank["dropped"] for rank in found) > 0, "nothing was dropped"
