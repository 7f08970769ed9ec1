"""Triton's autotuner in its interpreter, from the environment of torchtitan, which needs Triton."""

from __future__ import annotations

import pytest

from frameworks.environments import interpreter, reports, run_case

pytestmark = pytest.mark.framework


def test_a_step_in_which_a_kernel_is_tuned_is_a_warm_up() -> None:
    """The first step of each shape, and no other; the autotuner is its own again afterwards."""
    python = interpreter("torchtitan", "triton")
    (found,) = reports(run_case(python, "triton_tuning"))
    assert found["tuned"] == 2
    assert found["warmup"] == [True, False, True, False, False]
    assert found["errors"] == {}
