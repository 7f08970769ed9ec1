"""DeepSpeed's MOELayer on gloo ranks, bare and through its engine, with a capacity that drops pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.environments import interpreter, reports, root, run_case

pytestmark = [pytest.mark.framework, pytest.mark.multirank]

EXCHANGED = (
    "router permute dispatch dispatch! dispatch permute expert_gemm "
    "unpermute combine combine! combine unpermute"
)
ALONE = "router permute expert_gemm unpermute"
BACKWARD = (
    "unpermute combine combine! combine unpermute expert_gemm permute dispatch dispatch! dispatch "
    "permute router"
)
CPU = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(root() / "deepspeed" / "extensions")}


@pytest.fixture(autouse=True, scope="module")
def no_stale_locks() -> None:
    """A run that was killed while it built an extension leaves a lock that all later ones would wait for."""
    for lock in Path(CPU["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
        lock.unlink()


@pytest.mark.parametrize(
    ("options", "ranks"),
    [(("1",), 2), (("2",), 2), (("3",), 2), (("2", "engine"), 2), (("2",), 1)],
    ids=["top1", "top2", "top3", "engine", "one rank"],
)
def test_layers_show_both_exchanges_and_count_admitted_and_dropped(
    options: tuple[str, ...], ranks: int
) -> None:
    """Admitted pairs are those that arrive at the experts; pairs beyond the capacity are counted apart."""
    python = interpreter("deepspeed", "deepspeed")
    found = reports(run_case(python, "gshard_layers", "deepspeed", *options, ranks=ranks, **CPU))
    for rank in found:
        assert rank["adapters"] == ["deepspeed"]
        assert rank["layers"] == [0, 1]
        assert rank["sequences"] == [EXCHANGED if ranks > 1 else ALONE]
        assert rank["kinds"] == ["dropped", "routed"]
        for _, _, _, rows in rank["traffic"]:
            assert len(set(rows)) == 1, "rows are padded to the capacity: every rank gets as many"
    assert any(any(pairs) for rank in found for pairs in rank["dropped"].values()), "nothing was dropped"


def test_backward_is_told_apart_by_phase_with_its_exchanges() -> None:
    """The exchanges of the backward are its barriers, in the other order."""
    python = interpreter("deepspeed", "deepspeed")
    for rank in reports(run_case(python, "gshard_layers", "deepspeed", "2", ranks=2, **CPU)):
        assert rank["backward"] == [BACKWARD]


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_layers_show_the_same_phases_and_counts(ranks: int) -> None:
    """What Dynamo cannot follow breaks the graphs; phases and counts are those of the eager run."""
    python = interpreter("deepspeed", "deepspeed")
    for rank in reports(run_case(python, "gshard_layers", "deepspeed", "2", "compiled", ranks=ranks, **CPU)):
        assert rank["graphs"] > 0, "nothing was compiled"
        assert rank["sequences"] == [EXCHANGED if ranks > 1 else ALONE]
        assert rank["kinds"] == ["dropped", "routed"]


def test_autoep_layers_are_found_after_the_engine_has_put_them_in() -> None:
    """Blocks of a transformers model that AutoEP replaced: exchanges, counts, same bits, restored."""
    python = interpreter("deepspeed", "deepspeed.module_inject.auto_ep_layer")
    for rank in reports(run_case(python, "deepspeed_autoep", ranks=2, **CPU)):
        assert rank["blocks"] == ["AutoEPMoELayer", "AutoEPMoELayer"]
        assert rank["adapters"] == ["deepspeed"]
        assert rank["layers"] == [0, 1]
        assert rank["sequences"] == [
            "router permute dispatch! permute dispatch dispatch! dispatch permute expert_gemm "
            "unpermute combine combine! combine unpermute"
        ]
        assert rank["kinds"] == ["routed"]
