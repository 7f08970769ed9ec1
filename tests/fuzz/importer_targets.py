"""Files of other tools: profiler traces, load dumps, Nsight exports, wait matrices, placements."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fuzz.scratch import scratch_folder
from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.placement_file import read_placement
from moetrace_collectors.offline.analysis import analyze
from moetrace_collectors.offline.load_dumps import read_load_dumps
from moetrace_collectors.offline.perfetto import write_perfetto
from moetrace_collectors.offline.result_document import build_result, dump_result
from moetrace_collectors.offline.result_html import render_result
from moetrace_collectors.offline.result_terminal import print_analysis
from trace_files import moe_traces
from unit.collectors.test_offline_nsys import export

DATA = Path(__file__).parents[1] / "data"


class _FileTarget:
    """An input is a file of its own."""

    def __init__(self, name: str, file_name: str, read: Callable[[Path], object]) -> None:
        self.name = name
        self._path = scratch_folder() / file_name
        self._read = read
        self.seeds: list[bytes] = []
        self.documents: list[Any] = []

    def run(self, data: bytes) -> str:
        """One file."""
        self._path.write_bytes(data)
        try:
            self._read(self._path)
        except UsageError as error:
            if "\n" in str(error):
                raise AssertionError(f"an error of more than one line: {error}") from error
            return "refused"
        return "ok"


def _analyze(path: Path) -> None:
    # All that is shown of it too: a file that is read must be showable.
    analysis = analyze([path])
    json.loads(dump_result(build_result(analysis)))
    print_analysis(analysis, console=Console(file=io.StringIO(), highlight=False), outputs=[])
    render_result(analysis)
    write_perfetto(analysis, io.StringIO())


class TraceTarget(_FileTarget):
    """PyTorch profiler traces."""

    def __init__(self) -> None:
        super().__init__("profiler trace", "trace_rank0.json", _analyze)
        self.documents = [
            *moe_traces(ranks=1, steps=2, layers=1),
            *moe_traces(ranks=1, steps=1, layers=1, annotated=True, world_size=2),
        ]
        self.seeds = [json.dumps(document).encode() for document in self.documents]


class LoadDumpTarget(_FileTarget):
    """Expert-load dumps: JSON of several shapes, CSV, NPZ, routes."""

    def __init__(self) -> None:
        super().__init__("load dump", "load.json", read_load_dumps)
        counts = [[[3, 1, 0, 4], [2, 2, 2, 2]], [[1, 1, 1, 5], [0, 0, 8, 0]]]
        self.documents = [
            {"logical_count": counts, "top_k": 2, "steps": [0, 1]},
            {"counts": counts, "axes": ["step", "layer", "expert"]},
            {"layers": counts[0]},
            counts,
        ]
        archive = io.BytesIO()
        np.savez(archive, logical_count=np.array(counts), steps=np.array([0, 1]))
        self.seeds = [
            *(json.dumps(document).encode() for document in self.documents),
            b"step,layer,expert,count\n0,0,0,3\n0,0,1,5\n1,0,1,2\n",
            b'{"topk_ids_of_layer": [[[0, 1]], [[2, 3]]], "forward_mode": "decode", "rank": 0}\n',
            archive.getvalue(),
        ]


class NsysTarget(_FileTarget):
    """Nsight Systems exports: damaged SQLite files."""

    def __init__(self) -> None:
        super().__init__("nsight export", "report_rank0.sqlite", _analyze)
        with tempfile.TemporaryDirectory() as folder:
            self.seeds = [export(Path(folder) / "a.sqlite").read_bytes()]


class MatrixTarget(_FileTarget):
    """Wait matrices."""

    def __init__(self) -> None:
        super().__init__("wait matrix", "matrix.json", _analyze)
        document = json.loads((DATA / "matrices" / "wait_matrices.json").read_text())
        matrix = [[0.0, 1.0, 9.0], [1.0, 0.0, 8.5], [1.2, 1.1, 0.0]]
        archive = io.BytesIO()
        np.savez(archive, wait=np.array(matrix))
        self.documents = [matrix, {"dispatch": matrix, "combine": matrix}]
        if len(json.dumps(document)) < 20_000:
            self.documents.append(document)
        self.seeds = [*(json.dumps(document).encode() for document in self.documents), archive.getvalue()]


class PlacementTarget(_FileTarget):
    """Placements."""

    def __init__(self) -> None:
        super().__init__(
            "placement", "placement.json", lambda path: read_placement(path, num_experts=4, num_ranks=None)
        )
        self.documents = [
            {"physical_to_logical_map": [[0, 1, 2, 3], [3, 2, 1, 0]], "ranks": 2},
            {"expert_ranks": [0, 0, 1, 1], "ranks": 2},
            [[0, 1, 2, 3]],
        ]
        self.seeds = [json.dumps(document).encode() for document in self.documents]
