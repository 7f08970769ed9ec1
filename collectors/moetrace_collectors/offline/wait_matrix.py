"""N x N wait matrices in JSON files: where in a document they are, and whether they are such.

What they show is found by moetrace_collectors.verdict.wait_matrix, for files and for live steps alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.model import FloatArray
from moetrace_collectors.offline.source import bad_file

MAX_RANKS = 16_384


def matrices_in(document: object) -> dict[str, Any]:
    """Candidates for matrices in a parsed JSON document by name; empty where it holds none.

    Known forms: a bare list of rows, an object with `matrix`, and an object of such objects (or of bare
    lists) by name.
    """
    if _is_square(document):
        return {"matrix": document}
    if not isinstance(document, Mapping):
        return {}
    if _is_square(document.get("matrix")):
        return {str(document.get("name", "matrix")): document["matrix"]}
    found = {}
    for name, value in document.items():
        inner = value.get("matrix") if isinstance(value, Mapping) else value
        if not _is_square(inner):
            return {}
        found[str(name)] = inner
    return found


def checked_matrix(value: object, path: Path, place: str) -> FloatArray:
    """A square matrix of finite numbers of 0 or more.

    Raises:
        UsageError: anything else.
    """
    try:
        matrix = np.asarray(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise bad_file(path, place, "rows of numbers of equal length expected") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.dtype.kind not in "iuf":
        raise bad_file(path, place, "square matrix of numbers expected")
    if len(matrix) > MAX_RANKS:
        raise bad_file(path, place, f"at most {MAX_RANKS} ranks expected, got {len(matrix)}")
    waits: FloatArray = matrix.astype(np.float64)
    if not np.isfinite(waits).all() or (waits < 0).any():
        raise bad_file(path, place, "finite waits of 0 or more expected")
    return waits


def _is_square(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and len(row) == len(value) for row in value)
        and not isinstance(value[0][0], list | dict | str)
    )
