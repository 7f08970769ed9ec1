"""Arrays of counts that lie in documents: shape and values are checked here, once for all readers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.load_recording import MAX_COUNT, LoadRecording, check_size
from moetrace_collectors.offline.source import bad_file

COUNT_FIELDS = ("logical_count", "counts", "expert_counts", "expert_load", "load")
"""Names under which a document or archive keeps its array of counts."""


def integers(value: object, path: Path, place: str) -> IntArray:
    """Nested lists or an array as int64; whole floats are taken, anything else is refused.

    Raises:
        UsageError: ragged, not numbers, or numbers that are not whole or too large.
    """
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise bad_file(path, place, "lists of equal length that hold numbers expected") from error
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or (array != np.trunc(array)).any():
            raise bad_file(path, place, "whole numbers expected")
    elif array.dtype.kind not in "iu":
        raise bad_file(path, place, "whole numbers in lists of equal length expected")
    if array.size and (array.max() > MAX_COUNT or array.min() < -MAX_COUNT):
        raise bad_file(path, place, f"numbers of at most {MAX_COUNT} expected")
    return array.astype(np.int64)


def recording_from_array(
    value: object,
    path: Path,
    *,
    source: str,
    format: str,
    place: str,
    layers: Sequence[int] | npt.NDArray[Any] | None = None,
    steps: Sequence[int] | npt.NDArray[Any] | None = None,
    top_k: int | None = None,
    model_name: str = "",
    warnings: Sequence[str] = (),
) -> LoadRecording:
    """A recording from counts of [layers, experts] or [steps, layers, experts].

    Args:
        value: The counts.
        path: The file, for errors.
        source: As in `LoadRecording`.
        format: As in `LoadRecording`.
        place: Where in the file the counts lie, for errors.
        layers: Layer number of each row; 0, 1, 2, ... where the file does not tell.
        steps: Step of each entry; likewise.
        top_k: As in `LoadRecording`.
        model_name: As in `LoadRecording`.
        warnings: As in `LoadRecording`.

    Raises:
        UsageError: another shape, or values that are no counts.
    """
    counts = integers(value, path, place)
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or 0 in counts.shape:
        raise bad_file(
            path, place, f"[layers][experts] or [steps][layers][experts] expected, got shape {counts.shape}"
        )
    if int(counts.min()) < 0:
        raise bad_file(path, place, "counts of 0 or more expected")
    num_steps, num_layers, num_experts = counts.shape
    check_size(path, steps=num_steps, layers=num_layers, experts=num_experts)
    layer_numbers = _labels(layers, num_layers, path, "layers")
    return LoadRecording(
        source=source,
        format=format,
        steps=_labels(steps, num_steps, path, "steps"),
        forward_modes=(None,) * num_steps,
        layers=layer_numbers,
        layer_names=tuple(str(layer) for layer in layer_numbers.tolist()),
        counts=counts,
        top_k=top_k,
        model_name=model_name,
        warnings=tuple(warnings),
    )


def _labels(value: Sequence[int] | npt.NDArray[Any] | None, length: int, path: Path, place: str) -> IntArray:
    if value is None:
        return np.arange(length, dtype=np.int64)
    labels = integers(value, path, place)
    if labels.ndim != 1 or len(labels) != length or (np.diff(labels) <= 0).any() or (labels < 0).any():
        raise bad_file(path, place, f"{length} ascending numbers expected, as many as the counts have")
    return labels
