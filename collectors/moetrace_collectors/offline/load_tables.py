"""Tables of expert counts: CSV, Parquet and NPZ with named columns, long or wide.

Long: one row per (step, layer, expert) with a count; step may be absent. Wide: one row per (step, layer)
with one column per expert (`expert_0`, `expert_1`, ... or `0`, `1`, ...). NPZ may also hold one array
`counts` or `logical_count` of [layers, experts] or [steps, layers, experts].
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.load_arrays import COUNT_FIELDS, integers, recording_from_array
from moetrace_collectors.offline.load_recording import MAX_COUNT, CountBuilder, LoadRecording, decoder_layer
from moetrace_collectors.offline.source import bad_file, read_document

STEP_COLUMNS = ("step", "step_id", "iteration", "forward_pass_id", "pass")
LAYER_COLUMNS = ("layer", "layer_id", "layer_idx", "layer_index")
EXPERT_COLUMNS = ("expert", "expert_id", "logical_expert", "expert_idx")
VALUE_COLUMNS = ("count", "counts", "tokens", "num_tokens", "load", "rows")
MAX_NPZ_BYTES = 4 * 1024**3
"""Arrays of an archive may be this large altogether after decompression."""

_WIDE = re.compile(r"^(?:expert[_ ]?|e)?(\d{1,6})$", re.IGNORECASE)

Columns = Mapping[str, npt.NDArray[Any]]


def read_csv(path: Path, *, num_experts: int | None = None) -> LoadRecording:
    """The recording in a CSV file with a header line.

    Raises:
        UsageError: no usable header, or a value that is no count.
    """
    try:
        text = read_document(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_file(path, f"byte {error.start}", "text in UTF-8 expected") from error
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise bad_file(path, "", f"CSV expected ({error})") from error
    if not rows:
        raise bad_file(path, "line 1", "header with column names expected")
    header = [name.strip() for name in rows[0]]
    needed = _needed_columns(header, path)
    columns: dict[str, list[int]] = {header[index]: [] for index in needed}
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise bad_file(path, f"line {number}", f"{len(header)} values expected, got {len(row)}")
        for index in needed:
            columns[header[index]].append(_integer(row[index], path, f"line {number}, {header[index]}"))
    arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    return _from_columns(arrays, path, format="csv", num_experts=num_experts)


def read_parquet(path: Path, *, num_experts: int | None = None) -> LoadRecording:
    """The recording in a Parquet file.

    Raises:
        UsageError: not Parquet, no usable columns, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [names[index] for index in _needed_columns(names, path)]
            table = file.read(columns=wanted)
            arrays = {name: table.column(name).to_numpy() for name in wanted}
    except UsageError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise bad_file(path, "", f"Parquet expected ({_first_line(error)})") from error
    return _from_columns(
        {name: integers(values, path, f"column {name}") for name, values in arrays.items()},
        path,
        format="parquet",
        num_experts=num_experts,
    )


def read_npz(path: Path, *, num_experts: int | None = None) -> LoadRecording:
    """The recording in an NPZ archive.

    Raises:
        UsageError: not an archive of arrays, or none that holds counts.
    """
    arrays = npz_arrays(path)
    name = next((name for name in COUNT_FIELDS if name in arrays and arrays[name].ndim >= 2), None)
    if name is not None:
        return recording_from_array(
            arrays[name],
            path,
            source=str(path),
            format="npz",
            place=name,
            layers=arrays.get("layers"),
            steps=arrays.get("steps"),
            top_k=_scalar(arrays.get("top_k")),
        )
    columns = {name: values for name, values in arrays.items() if values.ndim == 1}
    wanted = _needed_columns(list(columns), path)
    names = list(columns)
    return _from_columns(
        {names[i]: integers(columns[names[i]], path, f"array {names[i]}") for i in wanted},
        path,
        format="npz",
        num_experts=num_experts,
    )


def npz_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every array of an archive by name; objects, which would need unpickling, are refused.

    Raises:
        UsageError: not an archive of arrays, or too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
            names = [info.filename for info in archive.infolist()]
        if size > MAX_NPZ_BYTES:
            raise bad_file(path, "", f"arrays of at most {MAX_NPZ_BYTES} bytes expected, got {size}")
        if not names or not all(name.endswith(".npy") for name in names):
            torch = any(name.endswith("data.pkl") for name in names)
            hint = "; of a torch.save file, write its logical_count as JSON" if torch else ""
            raise bad_file(path, "", f"archive of NumPy arrays (.npy members) expected{hint}")
        with np.load(path, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a corrupt archive raises whatever its corrupt header leads to
        raise bad_file(path, "", f"archive of NumPy arrays expected ({_first_line(error)})") from error


def has_columns(header: str) -> bool:
    """Whether a CSV header names the columns that a table of counts needs."""
    try:
        _needed_columns([name.strip() for name in header.split(",")], Path())
    except UsageError:
        return False
    return True


def _needed_columns(names: Sequence[str], path: Path) -> list[int]:
    """Indices of the columns to read: step if there, layer, then expert and count, or all wide ones."""
    step, layer = _find(names, STEP_COLUMNS), _find(names, LAYER_COLUMNS)
    expert, value = _find(names, EXPERT_COLUMNS), _find(names, VALUE_COLUMNS)
    wide = [index for index, name in enumerate(names) if _WIDE.match(name)]
    if layer is not None and expert is not None and value is not None:
        chosen = [layer, expert, value]
    elif layer is not None and wide:
        chosen = [layer, *wide]
    else:
        got = ", ".join(names[:8]) or "none"
        raise bad_file(
            path,
            "columns",
            f"layer, expert and count, or layer and one column per expert expected, got {got}",
        )
    return [step, *chosen] if step is not None else chosen


def _from_columns(columns: Columns, path: Path, *, format: str, num_experts: int | None) -> LoadRecording:
    names = list(columns)
    layers = columns[names[_found(names, LAYER_COLUMNS)]]
    step_at = _find(names, STEP_COLUMNS)
    steps = columns[names[step_at]] if step_at is not None else np.zeros(len(layers), dtype=np.int64)
    if any(len(values) != len(layers) for values in columns.values()):
        raise bad_file(path, "columns", "columns of equal length expected")
    if len(layers) and (int(layers.min()) < 0 or int(steps.min()) < 0):
        raise bad_file(path, "columns", "layers and steps of 0 or more expected")
    builder = CountBuilder(path)
    wide = {name: int(match[1]) for name in names if (match := _WIDE.match(name))}
    if _find(names, EXPERT_COLUMNS) is not None:
        experts = columns[names[_found(names, EXPERT_COLUMNS)]].tolist()
        counts = _checked(columns[names[_found(names, VALUE_COLUMNS)]], path)
        rows = zip(steps.tolist(), layers.tolist(), experts, counts.tolist(), strict=True)
        for step, layer, expert, count in rows:
            builder.add_count((step, None), decoder_layer(layer), expert, count)
    else:
        num_experts = num_experts or max(wide.values()) + 1
        for name, expert in wide.items():
            counts = _checked(columns[name], path)
            for step, layer, count in zip(steps.tolist(), layers.tolist(), counts.tolist(), strict=True):
                builder.add_count((step, None), decoder_layer(layer), expert, count)
    return builder.build(source=str(path), format=format, num_experts=num_experts, top_k=None)


def _checked(counts: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > MAX_COUNT):
        raise bad_file(path, "counts", f"values from 0 to {MAX_COUNT} expected")
    return counts


def _integer(cell: str, path: Path, place: str) -> int:
    text = cell.strip()
    try:
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) > MAX_COUNT or value != int(value):
        raise bad_file(path, place, f"whole number expected, got {text[:40]!r}")
    return int(value)


def _find(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    lowered = [name.lower() for name in names]
    return next((lowered.index(name) for name in wanted if name in lowered), None)


def _found(names: Sequence[str], wanted: Sequence[str]) -> int:
    at = _find(names, wanted)
    assert at is not None  # _needed_columns has made sure
    return at


def _scalar(value: npt.NDArray[Any] | None) -> int | None:
    return int(value) if value is not None and value.ndim == 0 and value.dtype.kind in "iu" else None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
