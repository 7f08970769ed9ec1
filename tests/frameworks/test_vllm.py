"""vLLM's CPU build: its engine generates a few tokens with a tiny model, eagerly and on one rank."""

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
