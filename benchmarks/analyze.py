"""`moetrace analyze` beside HolisticTraceAnalysis on the same traces: wall time and peak memory.

Two inputs: the four real ranks of tests/data/kineto/dlrm_4ranks, and one trace made of a real one repeated
with later times until it has the size asked for. moetrace does all that the command does (read, recognise,
join, align, document); HolisticTraceAnalysis loads the traces and makes its temporal breakdown, its
communication and computation overlap and its kernel breakdown, without plots. Each run is a process of
its own, the two alternate, and the best of the rounds counts: other work on the machine only ever adds.
Peak memory is the largest process's (HolisticTraceAnalysis parses several ranks in worker processes, whose
memory comes on top).

HolisticTraceAnalysis is no dependency: give a Python that has it with --hta, or it is installed into a
throw-away environment. Without it only moetrace is measured.

    python benchmarks/analyze.py [--hta PYTHON] [--megabytes 100] [--rounds 3] [--write]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from results import write_section

ROOT = Path(__file__).resolve().parents[1]
RANKS = ROOT / "tests" / "data" / "kineto" / "dlrm_4ranks"
HTA_PACKAGE = "HolisticTraceAnalysis==0.5.0"
OURS = """
import sys, time
begin = time.perf_counter()
from pathlib import Path
from moetrace_collectors.offline.analysis import analyze
from moetrace_collectors.offline.result_document import build_result, dump_result
ready = time.perf_counter()
dump_result(build_result(analyze([Path(path) for path in sys.argv[1:]])))
print("inside", time.perf_counter() - ready, ready - begin, file=sys.stderr)
"""
THEIRS = """
import sys, time, warnings
warnings.filterwarnings("ignore")
begin = time.perf_counter()
from hta.trace_analysis import TraceAnalysis
ready = time.perf_counter()
analysis = TraceAnalysis(trace_dir=".", trace_files=dict(enumerate(sys.argv[1:])))
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
print("inside", time.perf_counter() - ready, ready - begin, file=sys.stderr)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a process."""

    wall_s: float
    inside_s: float
    """Without starting Python and importing."""
    peak_mb: float


def measure(python: str, program: str, paths: list[Path]) -> Measured:
    """Run a program over the files.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/collectors:{ROOT}/schemas"}
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [python, "-c", program, *map(str, paths)],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(said[-2000:])
    inside = next(line for line in said.splitlines() if line.startswith("inside "))
    return Measured(wall_s=wall, inside_s=float(inside.split()[1]), peak_mb=usage.ru_maxrss / 1024)


def grown_trace(directory: Path, megabytes: int) -> Path:
    """A real trace repeated, each time later and with correlations of its own."""
    trace = json.loads(gzip.decompress((RANKS / "rank0.json.gz").read_bytes()))
    events = trace.pop("traceEvents")
    path = directory / "grown_rank0.json"
    with path.open("w") as out:
        out.write(json.dumps(trace)[:-1] + ',"traceEvents":[\n')
        written = repeat = 0
        while written < megabytes * 1_000_000:
            for event in events:
                copy = dict(event)
                if isinstance(copy.get("ts"), int):
                    copy["ts"] += repeat * 20_000
                args = copy.get("args")
                if isinstance(args, dict) and "correlation" in args:
                    copy["args"] = {**args, "correlation": args["correlation"] + repeat * 100_000}
                written += out.write(("," if written else "") + json.dumps(copy) + "\n")
            repeat += 1
        out.write("]}\n")
    return path


def hta_python(given: str | None, directory: Path) -> str | None:
    """A Python with HolisticTraceAnalysis; None where it cannot be had."""
    if given is not None:
        return given
    venv.create(directory / "hta", with_pip=True)
    python = str(directory / "hta" / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", HTA_PACKAGE], check=False)
    return python if done.returncode == 0 else None


def row(name: str, ours: Measured, theirs: Measured | None) -> str:
    """One line of the table."""
    own = f"{ours.wall_s:.2f} s, {ours.inside_s:.2f} s, {ours.peak_mb:.0f} MB"
    if theirs is None:
        return f"| {name} | {own} | not measured | - | - | - |"
    return (
        f"| {name} | {own} | {theirs.wall_s:.2f} s, {theirs.inside_s:.2f} s, {theirs.peak_mb:.0f} MB "
        f"| {theirs.wall_s / ours.wall_s:.1f} | {theirs.inside_s / ours.inside_s:.1f} "
        f"| {theirs.peak_mb / ours.peak_mb:.1f} |"
    )


def best(runs: list[Measured]) -> Measured:
    """The least of each figure."""
    return Measured(
        wall_s=min(run.wall_s for run in runs),
        inside_s=min(run.inside_s for run in runs),
        peak_mb=min(run.peak_mb for run in runs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hta", help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the grown trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines = [
        "| input | moetrace: command, without start, peak | HolisticTraceAnalysis: the same "
        "| x faster | x without start | x less memory |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        theirs_python = hta_python(options.hta, directory)
        inputs = {
            "4 real ranks, 0.2 MB gzip": sorted(RANKS.glob("*.gz")),
            f"1 rank, {options.megabytes} MB": [grown_trace(directory, options.megabytes)],
        }
        for title, paths in inputs.items():
            ours, theirs = [], []
            for _ in range(options.rounds):
                ours.append(measure(sys.executable, OURS, paths))
                if theirs_python is not None:
                    theirs.append(measure(theirs_python, THEIRS, paths))
            lines.append(row(title, best(ours), best(theirs) if theirs else None))
            print(lines[-1], flush=True)
    text = (
        f"Best of {options.rounds} alternating runs. {HTA_PACKAGE} loads and makes three breakdowns; "
        "`moetrace analyze` does all it does.\n\n" + "\n".join(lines) + "\n\n"
        f"    python benchmarks/analyze.py --megabytes {options.megabytes} --rounds {options.rounds} --write"
    )
    if options.write:
        write_section("analyze", "Offline: analyze beside HolisticTraceAnalysis", text)


if __name__ == "__main__":
    main()
