"""transformers, where a test runs its models: skipped if it is not installed, or does not take this torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def transformers_or_skip(*, whole_module: bool = False) -> Any:
    """The package."""
    transformers = pytest.importorskip("transformers")
    if not transformers.is_torch_available():
        pytest.skip(
            f"transformers {transformers.__version__} does not take torch {torch.__version__}",
            allow_module_level=whole_module,
        )
    return transformers
