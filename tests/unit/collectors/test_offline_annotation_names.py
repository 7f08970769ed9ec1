"""Annotations: the names that are phases, with direction and layer, and the many that are not."""

from __future__ import annotations

import pytest

from moetrace_collectors.offline.annotation_names import meaning_of
from moetrace_schemas.enums import Direction, Phase


@pytest.mark.parametrize(
    ("name", "phase", "direction", "layer"),
    [
        ("dispatch", Phase.DISPATCH, None, -1),
        ("DISPATCH", Phase.DISPATCH, None, -1),
        ("dispatch(F)", Phase.DISPATCH, Direction.FORWARD, -1),
        ("combine_bwd", Phase.COMBINE, Direction.BACKWARD, -1),
        ("MoE combine backward", Phase.COMBINE, Direction.BACKWARD, -1),
        ("fwd_dispatch", Phase.DISPATCH, Direction.FORWARD, -1),
        ("moetrace.expert_gemm", Phase.EXPERT_GEMM, None, -1),
        ("layers.3.mlp.token_dispatcher.dispatch", Phase.DISPATCH, None, 3),
        ("decoder.layers.7.mlp.experts", Phase.EXPERT_GEMM, None, 7),
        ("MoELayer.router", Phase.ROUTER, None, -1),
        ("moe_gate", Phase.ROUTER, None, -1),
        ("shared_experts", Phase.SHARED_EXPERT, None, -1),
        ("1st_a2a", Phase.DISPATCH, None, -1),
        ("2nd_a2a", Phase.COMBINE, None, -1),
        ("grouped_mm layer 2", Phase.EXPERT_GEMM, None, 2),
        ("moe_layer_3", Phase.FUSED, None, 3),
        ("attn_bwd", Phase.OUTSIDE, Direction.BACKWARD, -1),
        ("ATTN(W)", Phase.OUTSIDE, Direction.BACKWARD, -1),
        ("unpermute", Phase.UNPERMUTE, None, -1),
    ],
)
def test_known_names(name: str, phase: Phase, direction: Direction | None, layer: int) -> None:
    """Phase, direction and layer are read from the name."""
    meaning = meaning_of(name)
    assert meaning is not None
    assert (meaning.phase, meaning.direction, meaning.layer) == (phase, direction, layer)


def test_mlp_means_experts_only_beside_an_exchange() -> None:
    """In a dense model the same word is a dense layer, so the name asks for more evidence."""
    meaning = meaning_of("mlp (B)")
    assert meaning is not None
    assert meaning.needs_exchange
    assert meaning.phase is Phase.EXPERT_GEMM


@pytest.mark.parametrize(
    "name",
    [
        "",
        "forward",
        "## forward ##",
        "## all2all_data:recat_permute_gen ##",
        "ProfilerStep#3",
        "Optimizer.step#Adam.step",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "nccl:all_to_all",
        "gate",
        "topk",
        "route",
        "finalize",
        "DistributedDataParallel.forward",
        "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
        "x" * 10_000,
    ],
)
def test_other_names_are_no_phase(name: str) -> None:
    """Nothing is made of names that only contain a word, or that say too little."""
    assert meaning_of(name) is None
