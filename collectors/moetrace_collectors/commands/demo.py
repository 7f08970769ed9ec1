"""`moetrace demo`: the whole way on real input, from ranks that talk over gloo to a verdict and a report."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetrace_collectors.commands.suggestions import program, worst_steps
from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count
from moetrace_collectors.run_directory import RUNS_DIRECTORY, RunDirectory

if TYPE_CHECKING:
    from moetrace_collectors.demo_processes import RankOutcome
    from moetrace_collectors.views.report import RunReport

HELP = "run a real MoE model over several ranks, and name what made its steps slow"
MODELS = ("olmoe", "qwen3", "mixtral", "deepseek_v3")
NEEDED = {"torch": "torch", "transformers": "transformers"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run, what to slow down, and where the run goes."""
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="forward steps (default: %(default)s)")
    parser.add_argument(
        "--model",
        default="olmoe",
        choices=MODELS,
        help="architecture, small and with random weights (default: %(default)s)",
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="rank=R,phase=P,delay_ms=D[,layer=L][,every=N]",
        help="slow a rank in a phase, in layer L or in every MoE layer, in every N-th step; may be repeated",
    )
    parser.add_argument("--sample", default="1/1", metavar="1/N", help="sample one step in N (default: 1/1)")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="run directory (default: a new one in moetrace-runs/)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument(
        "--keep-running", action="store_true", help="leave the collector up and print its addresses"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run, join, judge, show.

    Raises:
        UsageError: an option is wrong, something is not installed, or the directory cannot be used.
    """
    for module, name in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"demo needs {name}: pip install 'moetrace[demo]'")
    from moetrace_collectors.demo_processes import (
        CollectorProcess,
        DemoFailedError,
        RankProcesses,
        make_plan,
    )

    _check_sample(arguments.sample)
    plan = make_plan(arguments.model, arguments.ranks, arguments.steps, arguments.inject)
    directory = _make_directory(arguments.dir, arguments.model)
    say = _Speaker()
    cores = os.cpu_count() or 1
    if arguments.ranks > cores:
        say(
            f"note: {arguments.ranks} ranks share {count(cores, 'core')} here, so ranks also wait for a "
            f"core, and small delays drown in that; --ranks {cores} gives quieter figures"
        )
    started = time.monotonic()
    collector = CollectorProcess(directory)
    keep = False
    try:
        say(f"collector: starting, store in {directory.store_path}")
        address = collector.start()
        say(
            f"ranks: starting {count(arguments.ranks, 'process', 'processes')} of {arguments.model} (gloo, "
            "all-to-all)"
        )
        ranks = RankProcesses(
            directory.path,
            plan,
            run_id=directory.path.name,
            endpoint=address,
            sample=arguments.sample,
        )
        outcomes = ranks.run(lambda done: say.progress(done, arguments.steps))
        keep = arguments.keep_running
    except DemoFailedError as error:
        print(f"moetrace: {error}", file=sys.stderr)
        return 1
    finally:
        stopped = keep or _stop(collector, DemoFailedError)
    sent = sum(outcome.exported for outcome in outcomes)
    say(f"ranks: done, {sent} rank steps sent in {time.monotonic() - started:.0f} s; joining and judging")
    report = _report(directory, sent, keep_running=keep)
    if report is None:
        say(
            f"no step was sampled (--sample {arguments.sample}, {count(arguments.steps, 'step')}): nothing "
            "to judge"
        )
        return 1
    _show(arguments, directory, report, outcomes, address if keep else None)
    lost = sum(outcome.sampled - outcome.exported for outcome in outcomes)
    if lost:
        reasons = ", ".join(f"{reason}: {steps}" for reason, steps in sorted(_drops(outcomes).items()))
        say(
            f"{lost:,} of {count(sent + lost, 'sampled rank step')} not delivered to the collector "
            f"({reasons})"
        )
    return 0 if stopped and not lost else 1


def _stop(collector: Any, failure: type[Exception]) -> bool:
    """Stop the collector; says what went wrong, and returns whether all was well."""
    try:
        collector.stop()
    except failure as error:
        print(f"moetrace: {error}", file=sys.stderr)
        return False
    return True


def _drops(outcomes: list[RankOutcome]) -> dict[str, int]:
    drops: dict[str, int] = {}
    for outcome in outcomes:
        for reason, steps in outcome.dropped.items():
            drops[reason] = drops.get(reason, 0) + steps
    return drops


def _check_sample(text: str) -> None:
    if not re.fullmatch(r"1(/[1-9][0-9]{0,8})?", text):
        raise UsageError(f"--sample {text}: 1/N expected, as in 1/10")


def _make_directory(chosen: Path | None, model: str) -> RunDirectory:
    path = chosen or RUNS_DIRECTORY / f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", path.name):
        raise UsageError(
            f"--dir {path}: its last part names the run; letters, digits and . _ : - expected, at most 128"
        )
    directory = RunDirectory(path=path)
    if directory.store_path.exists():
        raise UsageError(f"--dir {path}: holds a run already; give a new directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir {path}: cannot be created ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--dir {path}: not writable; give another directory")
    return directory


def _report(directory: RunDirectory, sent: int, *, keep_running: bool) -> RunReport | None:
    from moetrace_collectors.views.report import write_report
    from moetrace_collectors.views.store_rows import store_of_directory

    if not sent:
        return None
    with store_of_directory(directory) as store:
        if keep_running:
            _wait_for_verdicts(store, directory.path.name, sent)
        return write_report(store, directory.path.name, directory.report_path(directory.path.name))


def _wait_for_verdicts(store: Any, run_id: str, sent: int, timeout_s: float = 30.0) -> None:
    """Wait until `sent` rank steps are judged: a running collector may still be writing the last steps.

    A step's verdict is the last of its rows that is written, so where it is, the others are. Rank steps that
    came too late to be judged are waited for in vain, which `timeout_s` bounds.
    """
    give_up = time.monotonic() + timeout_s
    query = (
        "SELECT sum(world_size - length(missing_ranks)) AS n FROM {database:Identifier}.step_verdicts FINAL "
        "WHERE run_id = {run_id:String}"
    )
    while time.monotonic() < give_up:
        if int(store.rows(query, {"run_id": run_id})[0]["n"]) >= sent:
            return
        time.sleep(0.2)


def _show(
    arguments: argparse.Namespace,
    directory: RunDirectory,
    report: RunReport,
    outcomes: list[RankOutcome],
    address: str | None,
) -> None:
    if arguments.json:
        from moetrace_collectors.views.document import build_document, dump_document

        document = build_document(
            report.view,
            report.summary,
            store=str(directory.store_path),
            report=str(report.path),
            tracer_drops=_drops(outcomes),
        )
        sys.stdout.write(dump_document(document) + "\n")
        if address:
            print(f"collector: {address} (stop it with: kill {_owner_pid(directory)})", file=sys.stderr)
        return
    from rich.console import Console

    from moetrace_collectors.views.terminal import print_run

    console = Console(highlight=False)
    print_run(
        report.view,
        report.summary,
        console=console,
        store=str(directory.store_path),
        report=str(report.path),
        commands=_next_commands(arguments, directory, address),
    )


def _next_commands(arguments: argparse.Namespace, directory: RunDirectory, address: str | None) -> list[str]:
    source = f"--dir {shlex.quote(str(directory.path))}"
    commands = [worst_steps(source), f"{program()} report {source}"]
    if not arguments.inject and arguments.ranks > 1:
        # A fault to find, with as many ranks as the machine has cores for.
        quiet = f" --ranks {min(2, arguments.ranks)}"
        commands.insert(0, f"{program()} demo{quiet} --inject rank=1,phase=expert_gemm,delay_ms=30,layer=1")
    if address:
        commands += [f"curl {address}/metrics", f"kill {_owner_pid(directory)}   # stops the collector"]
    return commands


def _owner_pid(directory: RunDirectory) -> int | None:
    owner = directory.live_owner()
    return owner.pid if owner is not None else None


class _Speaker:
    """Progress on stderr: one changing line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0
        self._said = -1
        self._open_line = False

    def __call__(self, text: str) -> None:
        if self._open_line:
            print(file=sys.stderr)
            self._open_line = False
        print(f"moetrace: {text}", file=sys.stderr, flush=True)

    def progress(self, done: int, steps: int) -> None:
        """The slowest rank has finished `done` of `steps`."""
        now = time.monotonic()
        wait_s = 0.2 if self._terminal else 5.0
        if done == self._said or (now - self._last < wait_s and done < steps):
            return
        self._last, self._said = now, done
        text = f"moetrace: step {done} of {steps}" if done else "moetrace: ranks are loading"
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        else:
            print(text, file=sys.stderr, flush=True)
