"""How often an injected delay is named on real gloo ranks: every phase, as many ranks as cores and more.

Each row is one `moetrace demo` run; the first 5 steps are warm-up. `delay / step` is the delay over the
median step of the run without it (the slowed step minus the delay).

    python benchmarks/injection.py [--steps 45] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import write_section

PHASES = ("router", "permute", "dispatch", "expert_gemm", "combine", "outside")
DELAY_MS = {2: 16.0, 4: 34.0}
WARMUP = 5


def demo(directory: Path, *options: str) -> dict[str, Any]:
    """The JSON document of one demo run."""
    command = [sys.executable, "-m", "moetrace_collectors.cli", "demo", "--json", "--dir", str(directory)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def row(ranks: int, phase: str, steps: int, folder: Path) -> str:
    """One run as a line of the table."""
    delay_ms, rank, layer = DELAY_MS[ranks], ranks - 1, 2
    inject = f"rank={rank},phase={phase},delay_ms={delay_ms:g},layer={layer}"
    options = ("--ranks", str(ranks), "--steps", str(steps), "--inject", inject)
    verdicts = [
        verdict
        for verdict in demo(folder / f"{ranks}-{phase}", *options)["verdicts"]
        if verdict["step"] >= WARMUP
    ]
    right = [v for v in verdicts if (v["rank"], v["phase"]) == (rank, phase)]
    clear = [v for v in verdicts if v["evidence"] == "clear"]
    wrong = [v for v in clear if v not in right]
    step_ms = statistics.median(v["step_ms"] for v in verdicts)
    return (
        f"| {ranks} | {phase} | {delay_ms / (step_ms - delay_ms):.2f} | {len(right)} of {len(verdicts)} | "
        f"{sum(v['layer'] == layer for v in right)} | {len(clear)} | {len(wrong)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines = [
        f"`python benchmarks/injection.py --steps {options.steps}`: OLMoE demo model, a delay in one layer "
        "of the last rank.",
        "",
        "| ranks | phase | delay / step | (rank, phase) right | layer right too | clear | clear and wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in DELAY_MS:
            for phase in PHASES:
                lines.append(row(ranks, phase, options.steps, Path(folder)))
                print(lines[-1], flush=True)
    if options.write:
        write_section("injection", "Injected delays named on real ranks", "\n".join(lines))


if __name__ == "__main__":
    main()
