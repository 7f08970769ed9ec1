"""Names of annotations -> phase, direction and layer. Pure; strict, so that nothing is invented.

A name is cut into words. Words that say only where (moe, layer, block, numbers) or which way (forward,
fwd, F; backward, bwd, B) are read and set aside; what is left must be exactly one of the known names.
So `layers.3.mlp.token_dispatcher.dispatch`, `dispatch(F)`, `MoE combine backward` and
`moetrace.expert_gemm` are phases, and `## all2all_data:recat_permute_gen ##` is not one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from moetrace_schemas.enums import Direction, Phase

COMMUNICATION = re.compile(r"^(?:nccl|rccl|gloo|mpi|ucc|xccl|hccl):(\w+)")
"""What PyTorch's process groups write around their collectives."""
STEP = re.compile(r"^ProfilerStep\s*#\s*(\d{1,15})$")
ENGINE_STEP = re.compile(r"^execute_\d+_context_\d+\(")
"""What vLLM writes around each step of its engine; it carries no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationMeaning:
    """What a recognised annotation says of the work inside it."""

    phase: Phase
    """OUTSIDE for work that is named and no part of the MoE block, such as attention."""
    direction: Direction | None
    """None where the name does not say."""
    layer: int
    """-1 where the name does not say."""
    needs_exchange: bool = False
    """A name that means experts only in a trace that also names dispatch or combine, such as mlp."""


_PHASES: dict[str, Phase] = {
    # ours: the closed set by its own names
    "router": Phase.ROUTER,
    "permute": Phase.PERMUTE,
    "dispatch": Phase.DISPATCH,
    "expert gemm": Phase.EXPERT_GEMM,
    "combine": Phase.COMBINE,
    "unpermute": Phase.UNPERMUTE,
    "shared expert": Phase.SHARED_EXPERT,
    "fused": Phase.FUSED,
    # Megatron-Core, torchtitan, DeepSpeed, Tutel, MegaBlocks, vLLM, SGLang and hand-made marks
    "gate": Phase.ROUTER,
    "gating": Phase.ROUTER,
    "topk": Phase.ROUTER,
    "top k": Phase.ROUTER,
    "topk gate": Phase.ROUTER,
    "topkgate": Phase.ROUTER,
    "routing": Phase.ROUTER,
    "route": Phase.ROUTER,
    "select experts": Phase.ROUTER,
    "token permutation": Phase.PERMUTE,
    "permutation": Phase.PERMUTE,
    "dispatch preprocess": Phase.PERMUTE,
    "preprocess": Phase.PERMUTE,
    "token dispatch": Phase.DISPATCH,
    "token dispatcher dispatch": Phase.DISPATCH,
    "dispatcher dispatch": Phase.DISPATCH,
    "dispatch alltoall": Phase.DISPATCH,
    "alltoall dispatch": Phase.DISPATCH,
    "1st alltoall": Phase.DISPATCH,
    "experts": Phase.EXPERT_GEMM,
    "expert": Phase.EXPERT_GEMM,
    "expert mlp": Phase.EXPERT_GEMM,
    "experts mlp": Phase.EXPERT_GEMM,
    "expert ffn": Phase.EXPERT_GEMM,
    "expert compute": Phase.EXPERT_GEMM,
    "experts compute": Phase.EXPERT_GEMM,
    "expert forward": Phase.EXPERT_GEMM,
    "routed experts": Phase.EXPERT_GEMM,
    "routed experts compute": Phase.EXPERT_GEMM,
    "grouped gemm": Phase.EXPERT_GEMM,
    "grouped mm": Phase.EXPERT_GEMM,
    "group gemm": Phase.EXPERT_GEMM,
    "token combine": Phase.COMBINE,
    "token dispatcher combine": Phase.COMBINE,
    "dispatcher combine": Phase.COMBINE,
    "combine alltoall": Phase.COMBINE,
    "alltoall combine": Phase.COMBINE,
    "2nd alltoall": Phase.COMBINE,
    "token unpermutation": Phase.UNPERMUTE,
    "unpermutation": Phase.UNPERMUTE,
    "combine postprocess": Phase.UNPERMUTE,
    "postprocess": Phase.UNPERMUTE,
    "finalize": Phase.UNPERMUTE,
    "shared experts": Phase.SHARED_EXPERT,
    "shared experts compute": Phase.SHARED_EXPERT,
    "shared mlp": Phase.SHARED_EXPERT,
}
_ONLY_WITH_MOE = frozenset(
    {"fused", "gate", "route", "routing", "preprocess", "postprocess", "finalize", "topk"}
)
"""Names too common by themselves: they count where the rest of the name says moe, expert or mlp."""
_OUTSIDE = frozenset(
    {
        "attn",
        "attention",
        "self attn",
        "self attention",
        "mla",
        "core attn",
        "core attention",
        "input layernorm",
    }
)
_EXPERTS_BESIDE_EXCHANGE = frozenset({"mlp", "ffn"})
_WHOLE_LAYER = frozenset({"moe", "moe layer", "moe block", "sparse moe block", "fused moe", "moe mlp"})

_DIRECTION_WORDS = {
    "forward": Direction.FORWARD,
    "fwd": Direction.FORWARD,
    "fprop": Direction.FORWARD,
    "f": Direction.FORWARD,
    "backward": Direction.BACKWARD,
    "bwd": Direction.BACKWARD,
    "bprop": Direction.BACKWARD,
    "b": Direction.BACKWARD,
    "w": Direction.BACKWARD,
    "dgrad": Direction.BACKWARD,
    "wgrad": Direction.BACKWARD,
    "grad": Direction.BACKWARD,
}
"""F, B and W are the marks of pipeline schedules: forward, backward for inputs, backward for weights."""
_PLACE_WORDS = frozenset(
    {"moetrace", "moe", "model", "decoder", "layer", "layers", "block", "blocks", "nn", "module", "the", "of",
     "phase", "chunk", "mb", "microbatch", "mlp", "ffn", "feed", "step", "ep", "rank", "l"}
)  # fmt: skip
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+(?:st|nd|rd|th)?")
_ALL_TO_ALL = re.compile(r"all[_ -]?(?:2|to)[_ -]?all|a2a", re.IGNORECASE)
_LAYER = re.compile(r"(?:layers?|blocks?|moe|\bl)[\s._\[#:=-]*(\d{1,4})\b", re.IGNORECASE)


@cache
def meaning_of(name: str) -> AnnotationMeaning | None:
    """The meaning of an annotation's name; None for a name that is no phase."""
    if len(name) > 300:
        return None
    plain = _ALL_TO_ALL.sub(" alltoall ", name.replace("MoE", "moe"))
    words = [word.lower() for word in _WORDS.findall(plain)]
    direction = next((_DIRECTION_WORDS[word] for word in words if word in _DIRECTION_WORDS), None)
    rest = [word for word in words if word not in _DIRECTION_WORDS and not word.isdigit()]
    layer = _layer(name)
    if " ".join(rest) in _WHOLE_LAYER:
        return AnnotationMeaning(phase=Phase.FUSED, direction=direction, layer=layer)
    within_moe = any(word in ("moe", "moetrace", "experts", "expert") for word in rest)
    kept = [word for word in rest if word not in _PLACE_WORDS]
    text = " ".join(kept)
    if text in _OUTSIDE:
        return AnnotationMeaning(phase=Phase.OUTSIDE, direction=direction, layer=layer)
    if not kept:
        last = rest[-1] if rest else ""
        if last in _EXPERTS_BESIDE_EXCHANGE:
            return AnnotationMeaning(
                phase=Phase.EXPERT_GEMM, direction=direction, layer=layer, needs_exchange=True
            )
        return None
    phase = _PHASES.get(text)
    if phase is None or (text in _ONLY_WITH_MOE and not within_moe):
        return None
    return AnnotationMeaning(phase=phase, direction=direction, layer=layer)


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1
