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
NOT_BUILT = {
    "dbrx": "its configuration does not take back the values that it gives",
    "qwen3_omni_moe": "its parts need the configuration of the whole, which is not small; see transformers 5",
}
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


def test_every_family_is_covered(families: dict[str, dict[str, Any]]) -> None:
    """All blocks with experts are found, mixture of attention excepted."""
    assert len(families) >= 28
    for family, line in families.items():
        assert set(line["missing"]) <= {"JetMoeMoA"}, family
        assert bool(line["layers"]) == (family not in NO_LAYERS.keys() | NOT_BUILT.keys()), line


def test_steps_show_the_phases_and_count_what_the_router_chose(families: dict[str, dict[str, Any]]) -> None:
    """Outputs are the same bits traced or not; counts equal the router's choices in every layer and step."""
    for family in families.keys() - NO_LAYERS.keys() - NOT_BUILT.keys() - NOT_RUN.keys():
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
