"""Sampled routes as files: NPZ or NPY with routes [tokens, layers, top_k], or a counted matrix. I/O only.

NPZ names: `routes` (also `topk_ids`), or `coactivation` for the matrix [layers, experts, experts]. Routes are
of a sample: counts stay counts of the sample, and only shares are taken from them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.coactivation import CoActivation, coactivation_of_matrix, count_coactivation
from moetrace_collectors.offline.source import bad_file

ROUTE_NAMES = ("routes", "topk_ids")
MATRIX_NAMES = ("coactivation",)


def read_coactivation(path: Path, *, num_experts: int) -> CoActivation:
    """Count the co-activation of the routes in a file, or take the matrix in it.

    Raises:
        UsageError: not such a file, or values that are no routes.
    """
    name, array = _read_array(path)
    try:
        if name in MATRIX_NAMES:
            return coactivation_of_matrix(array, num_experts=num_experts)
        return count_coactivation(array, num_experts=num_experts)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_array(path: Path) -> tuple[str, npt.NDArray[Any]]:
    names = (*ROUTE_NAMES, *MATRIX_NAMES)
    try:
        with path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return ROUTE_NAMES[0], loaded
            name = next((name for name in names if name in loaded.files), None)
            if name is not None:
                return name, loaded[name]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise bad_file(path, "", "NPZ or NPY with routes [tokens, layers, top_k] expected") from error
    raise bad_file(path, "", f"an array named {' or '.join(names)} expected")
