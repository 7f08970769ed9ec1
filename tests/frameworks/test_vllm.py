"""vLLM's CPU build: its engine generates a few tokens with a tiny model, on one rank."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = pytest.mark.framework


def test_prefill_and_decode_steps_show_phases_and_exact_counts() -> None:
    """The same tokens are generated traced or not; counts equal the best k of the gate's logits."""
    python = interpreter("vllm", "vllm")
    (found,) = reports(run_case(python, "vllm_engine"))
    assert found["adapters"] == ["vllm"]
    assert found["sequences"] == ["router permute expert_gemm unpermute"]
    assert found["kinds"] == ["routed"]


def test_a_compiled_engine_shows_the_same_behind_the_operator_of_its_layers() -> None:
    """The graphs, made before anything was instrumented, call what is wrapped; none is made anew."""
    python = interpreter("vllm", "vllm")
    (found,) = reports(run_case(python, "vllm_engine", "compiled"))
    assert found["compiled_graphs"] > 0, "nothing was compiled"
    assert found["graph_breaks"] == [0, 0]
    assert found["sequences"] == ["router permute expert_gemm unpermute"]
    assert found["kinds"] == ["routed"]


def test_layers_that_the_cpu_build_traces_into_its_graphs_are_said_to_be_missing() -> None:
    """There is nothing to wrap in such a graph: all call sites are unseen, and nothing is counted."""
    python = interpreter("vllm", "vllm")
    (found,) = reports(run_case(python, "vllm_engine", "traced"))
    assert found["compiled_graphs"] > 0, "nothing was compiled"
