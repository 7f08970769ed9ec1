"""transformers 4.57 in an environment of its own: experts one by one, linears over sorted rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frameworks.environments import interpreter, run_case

pytestmark = pytest.mark.framework

NO_LAYERS = {
    "doge": "product keys look up rows of an embedding for each token: there are no routed experts to time",
    "vitpose_backbone": "the data set's number picks the expert for a whole image: there is no router",
}
NO_LAYERS_BLOCKS = {"VitPoseBackboneMoeMLP"}
"""Classes of blocks in those families."""
NOT_BUILT = {
    "Qwen3OmniMoeCode2Wav": "makes sound of codes, densely; its configuration is a part of a part",
    "Qwen3OmniMoeCode2WavDecoderBlock": "a part that its model builds with sizes; no experts in it",
    "Qwen3OmniMoeCode2WavTransformerModel": "makes sound of codes, densely; see Qwen3OmniMoeCode2Wav",
}
"""Classes that cannot be built from a configuration alone, and why."""
NO_EXPERTS = {
    "Vision": "sees images: the experts are in the model of text beside it",
    "Audio": "hears: the experts are in the model of text beside it",
    "TalkerCodePredictor": "predicts codes, densely",
    "PreTrainedModelForConditionalGeneration": "a base of others, without layers",
}
"""Parts of names of model classes that have no experts in families that have, and why."""
NAMED_OTHERWISE = {
    "aria": "AriaGroupedExpertsMLP",
    "granitemoeshared": "GraniteMoeSharedParallelExperts",
}
"""Families whose experts do not bear the names by which the test looks for them."""
NOT_RUN = {
    "aria": "its default asks for more experts per token than a small configuration has",
    "glm4v_moe": "wants positions in three dimensions; see transformers 5",
}
"""Found and matched, but of which no step is run."""

BLOCK = ["fused", "router", "fused"]
LINEARS = ["fused", "router", "fused", "expert_gemm", "fused", "expert_gemm", "fused"]
ORDERS = (
    BLOCK,
    [*BLOCK, "shared_expert", "fused"],
    ["fused", "shared_expert", *BLOCK],
    LINEARS,
    ["router", "fused"],
    ["router", "fused", "shared_expert"],
)


@pytest.fixture(scope="module")
def families() -> dict[str, dict[str, Any]]:
    """What the case prints, by family: found and run in one process, since importing is what takes long."""
    python = interpreter("transformers4", "")
    (printed,) = run_case(python, "transformers_4")
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert lines
    assert lines[0]["version"].startswith("4.")
    return {line["family"]: line for line in lines}


def test_every_model_class_with_experts_is_covered(families: dict[str, dict[str, Any]]) -> None:
    """Each class builds, or is listed with the reason; all of its blocks are found, and nothing else is."""
    assert len(families) >= 28
    for family, line in families.items():
        assert set(line["missing"]) <= {"JetMoeMoA", *NO_LAYERS_BLOCKS}, family
        assert bool(line["invented"]) == (family in NAMED_OTHERWISE), line["invented"]
        for name, layers in line["layers"].items():
            dense = family in NO_LAYERS or any(part in name for part in NO_EXPERTS)
            assert bool(layers) != dense, f"{name}: {layers} layers"
    failed = {name: why for line in families.values() for name, why in line["failed"].items()}
    assert failed.keys() == NOT_BUILT.keys(), failed


def test_steps_show_the_phases_and_count_what_the_router_chose(families: dict[str, dict[str, Any]]) -> None:
    """Outputs are the same bits traced or not; counts equal the router's choices in every layer and step."""
    for family in families.keys() - NO_LAYERS.keys() - NOT_RUN.keys():
        assert "error" not in families[family], families[family]
        assert families[family]["order"] in ORDERS, family


COMPILED = {
    "mixtral": BLOCK,
    "deepseek_v3": [*BLOCK, "shared_expert", "fused"],
    "gpt_oss": ["router", "fused"],
    "granitemoe": LINEARS,
}
"""One family of each layout."""


def test_compiled_models_show_the_same_phases_and_counts() -> None:
    """Experts that are picked by the data break the graphs, traced or not; results keep their bits."""
    python = interpreter("transformers4", "")
    (printed,) = run_case(python, "transformers_4", "compiled", *COMPILED)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [line["family"] for line in lines] == list(COMPILED)
    for line in lines:
        assert "error" not in line, line
        assert line["order"] == COMPILED[line["family"]]
        assert line["graphs"] > 0, "nothing was compiled"
        assert line["graph_breaks"][0] > 0
        assert "router" in line["backward"]
