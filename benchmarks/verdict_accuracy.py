"""How often the verdict names the injected (rank, phase), how sure it is, and what naive rules say.

Simulated runs (moetrace_collectors.simulate) of 4 to 16 ranks and 4 to 16 layers. Per cause and noise level
half of the faulty steps are a persistent fault from step 20 on and half are spikes in every fifth step, half
of them in one layer and half in all. Every faulty step counts, the first ones after the onset included.

Noise: every interval of local work is log-normal with sigma 1, 5 or 10 %; `usual` adds 0.05 scheduling
hiccups of 0.1 ms per rank and step (a calm step takes 1.5 ms a layer), `noisy` one of 0.3 ms. Expert
popularity is log-normal with sigma 10 %, drawn anew for every layer and step.

- recall: faulty steps in which the suspect is the injected rank and phase, whatever the evidence;
  precision: the same among faulty steps in which anyone is named.
- clear: faulty steps with a clear verdict; wrong: clear verdicts that name anything else.
- ambiguous right: ambiguous verdicts that name the injected rank and phase (their calibration).
- cause: right causes among right suspects.
- from the first step: a run in which the fault is there from the beginning and in every step, so that there
  are no calm steps to compare with. right, unclear, hiccup (a clear verdict that names what the noise did)
  and wrong are `moetrace_collectors.simulated_truth`'s; `link, one layer` and `link, one group` have peers to
  be compared with, `link` has none but the way back.
- naive rules name a rank only: longest collective (its duration), longest total time (waits included), latest
  start of the last exchange by raw clocks (offsets of 1 ms, 20 ppm drift, 50 us jitter).

    python benchmarks/verdict_accuracy.py [--steps 1000] [--extension 0.05] [--first-step] [--write]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from results import write_section

from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.simulate import DEVICE_PHASES, Clocks, Injection, Noise, SimulatedRun, simulate
from moetrace_collectors.simulated_truth import Outcome, outcome
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Cause, Evidence

NOISE = {
    "quiet": Noise(spread=0.01),
    "usual": Noise(spread=0.05, hiccups_per_step=0.05, hiccup_ns=100_000.0),
    "noisy": Noise(spread=0.10, hiccups_per_step=1.0, hiccup_ns=300_000.0),
}
CLOCKS = Clocks(offset_ns=1e6, drift_ppm=20.0, jitter_ns=5e4)
SHAPES = ((8, 8), (4, 16), (16, 4), (8, 12))
"""(ranks, layers) of successive runs."""
ONSET = 20
STEPS_PER_RUN = 120
SPIKE_EVERY = 5
CAUSES = (
    Cause.DEVICE,
    Cause.OUTSIDE,
    Cause.HOST,
    Cause.ROUTING,
    Cause.PLACEMENT,
    Cause.LINK,
)
RULES = ("longest collective", "longest total", "latest start")


@dataclass(slots=True)
class Tally:
    """Counts over the judged steps of one cause and noise level."""

    steps: int = 0
    right: int = 0
    clear: int = 0
    clear_wrong: int = 0
    ambiguous: int = 0
    ambiguous_right: int = 0
    cause_right: int = 0
    rules: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))

    def add(self, joined: JoinedStep, verdict: StepVerdict, truth: Injection | None) -> None:
        """Count one step."""
        self.steps += 1
        suspect = verdict.suspect
        right = (
            truth is not None
            and suspect is not None
            and (suspect.rank, suspect.phase) == (truth.rank, truth.named_phase)
        )
        self.right += right
        self.clear += verdict.evidence is Evidence.CLEAR
        self.clear_wrong += verdict.evidence is Evidence.CLEAR and not right
        self.ambiguous += verdict.evidence is Evidence.AMBIGUOUS
        self.ambiguous_right += verdict.evidence is Evidence.AMBIGUOUS and right
        if truth is not None:
            wanted = right or truth.cause is Cause.LINK
            self.cause_right += wanted and verdict.cause is truth.cause
            for rule, rank in naive_ranks(joined).items():
                self.rules[rule] += rank == truth.rank


def naive_ranks(joined: JoinedStep) -> dict[str, int]:
    """The rank that each rule in use today would name."""
    longest, total, started = [], [], []
    for record in joined.rank_steps:
        rows = record.phases
        inside = (rows.flags & int(RowFlag.BARRIER)) != 0
        longest.append(int(rows.duration_ns[inside].max()))
        total.append(int(rows.duration_ns.sum()))
        started.append(record.start_unix_ns + int(rows.start_offset_ns[inside][-1]))
    ranks = [record.rank for record in joined.rank_steps]
    return {rule: ranks[int(np.argmax(v))] for rule, v in zip(RULES, (longest, total, started), strict=True)}


def runs(
    cause: Cause | None, noise: Noise, extension: float, steps: int, *, spikes: bool
) -> Iterator[SimulatedRun]:
    """Runs that hold `steps` faulty steps (or calm ones) together."""
    every = SPIKE_EVERY if spikes else 1
    per_run = STEPS_PER_RUN if cause is None else (STEPS_PER_RUN - ONSET) // every
    for index in range(-(-steps // per_run)):
        ranks, layers = SHAPES[index % len(SHAPES)]
        random = np.random.default_rng(index)
        injections: tuple[Injection, ...] = ()
        if cause is not None:
            injections = (
                Injection(
                    cause=cause,
                    rank=int(random.integers(ranks)),
                    extension=extension,
                    phase=DEVICE_PHASES[index % len(DEVICE_PHASES)],
                    # One layer has too few rows to carry a skew of the whole step.
                    layer=None
                    if index // 4 % 2 == 0 or cause in (Cause.ROUTING, Cause.PLACEMENT)
                    else int(random.integers(layers)),
                    first_step=ONSET,
                    every=every,
                ),
            )
        yield SimulatedRun(
            seed=1000 * index + 10 * (CAUSES.index(cause) if cause else 9) + spikes,
            run_id=f"{cause}-{index}-{spikes}",
            num_ranks=ranks,
            num_layers=layers,
            ranks_per_node=8,
            num_steps=STEPS_PER_RUN,
            noise=noise,
            clocks=CLOCKS,
            injections=injections,
        )


def tally(cause: Cause | None, noise: Noise, extension: float, steps: int, *, spikes: bool) -> Tally:
    """Judge the runs of one cause and noise level."""
    result = Tally()
    for run in runs(cause, noise, extension, steps, spikes=spikes):
        engine = VerdictEngine()
        for simulated in simulate(run):
            verdict = engine.judge(simulated.joined)
            if simulated.truth or cause is None:
                result.add(simulated.joined, verdict, simulated.truth[0] if simulated.truth else None)
    return result


FIRST_STEP_CASES: tuple[tuple[str, Cause, bool, bool], ...] = (
    *((cause.value, cause, False, False) for cause in CAUSES),
    ("link, one layer", Cause.LINK, True, False),
    ("link, one group", Cause.LINK, False, True),
)
"""(name, cause, in one layer only, four groups instead of one)."""
FIRST_STEP_EXTENSIONS = (0.05, 0.3)


def from_the_first_step(
    case: tuple[str, Cause, bool, bool], noise: Noise, extension: float, steps: int
) -> Counter[Outcome]:
    """Outcomes of runs that have never been calm."""
    _, cause, one_layer, grouped = case
    found: Counter[Outcome] = Counter()
    for index in range(-(-steps // STEPS_PER_RUN)):
        ranks, layers = SHAPES[index % len(SHAPES)]
        random = np.random.default_rng(index)
        fault = Injection(
            cause=cause,
            rank=int(random.integers(ranks)),
            extension=extension,
            phase=DEVICE_PHASES[index % len(DEVICE_PHASES)],
            layer=int(random.integers(layers)) if one_layer else None,
        )
        run = SimulatedRun(
            seed=1000 * index + 10 * CAUSES.index(cause) + 5,
            num_ranks=4 * ranks if grouped else ranks,
            ep_size=ranks,
            num_layers=layers,
            num_steps=STEPS_PER_RUN,
            noise=noise,
            injections=(fault,),
        )
        engine = VerdictEngine()
        found.update(outcome(step, engine.judge(step.joined)) for step in simulate(run))
    return found


def first_step_table(steps: int) -> list[str]:
    """The table of runs that have never been calm."""
    lines = ["| noise | extension | cause | steps | right | unclear | hiccup | wrong |", "|" + "---|" * 8]
    for level, noise in NOISE.items():
        for extension in FIRST_STEP_EXTENSIONS:
            for case in FIRST_STEP_CASES:
                found = from_the_first_step(case, noise, extension, steps)
                total = found.total()
                parts = " | ".join(
                    f"{found[kind] / total:.3f}" for kind in (Outcome.RIGHT, Outcome.UNCLEAR, Outcome.HICCUP)
                )
                lines.append(
                    f"| {level} | {extension:.0%} | {case[0]} | {total} | {parts} | {found[Outcome.WRONG]} |"
                )
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the verdict on simulated faults.")
    parser.add_argument("--steps", type=int, default=1000, help="faulty steps per cause and noise level")
    parser.add_argument("--extension", type=float, default=0.05, help="injected extension, part of the step")
    parser.add_argument("--first-step", action="store_true", help="only the runs that have never been calm")
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    if arguments.first_step:
        table = "\n".join(first_step_table(arguments.steps))
        if arguments.write:
            text = (
                "Simulated; the fault is there from the first step on and in every step. "
                f"`python benchmarks/verdict_accuracy.py --first-step --steps {arguments.steps} --write`; "
                "columns are defined at its head.\n\n" + table
            )
            write_section("verdict_accuracy_first_step", "Verdict accuracy without calm steps", text)
        return
    lines = [
        "| noise | cause | fault | steps | precision | recall | clear | clear wrong | ambiguous (right) | "
        "cause right | " + " | ".join(f"{rule} (rank)" for rule in RULES) + " |",
        "|" + "---|" * (10 + len(RULES)),
    ]
    for level, noise in NOISE.items():
        calm = tally(None, noise, arguments.extension, arguments.steps, spikes=False)
        lines.append(
            f"| {level} | none | | {calm.steps} | | | {calm.clear / calm.steps:.1%} | {calm.clear_wrong} | "
            f"{calm.ambiguous} | |" + " |" * len(RULES)
        )
        print(lines[-1], flush=True)
        for cause in CAUSES:
            for spikes in (False, True):
                found = tally(cause, noise, arguments.extension, arguments.steps // 2, spikes=spikes)
                lines.append(_line(level, cause, "spikes" if spikes else "persistent", found))
                print(lines[-1], flush=True)
    if arguments.write:
        text = (
            f"Simulated, injected extension {arguments.extension:.0%} of a calm step. "
            f"`python benchmarks/verdict_accuracy.py --steps {arguments.steps} "
            f"--extension {arguments.extension} --write`; columns are defined at its head. A slow link is "
            "told as a cause without a rank (all ranks wait alike), so it has no recall.\n\n"
            + "\n".join(lines)
        )
        key = f"verdict_accuracy_{arguments.extension:g}"
        write_section(key, f"Verdict accuracy, {arguments.extension:.0%} extension", text)


def _line(level: str, cause: Cause, fault: str, found: Tally) -> str:
    total = found.steps
    named = max(found.clear + found.ambiguous, 1)
    right = f"{found.right / named:.3f} | {found.right / total:.3f}"
    if cause is Cause.LINK:
        right = "| rank not told"
    causes = total if cause is Cause.LINK else max(found.right, 1)
    rules = " | ".join("" if cause is Cause.LINK else f"{found.rules[rule] / total:.2f}" for rule in RULES)
    clear = f"{found.clear / total:.3f} | {found.clear_wrong}"
    ambiguous = f"{found.ambiguous} ({found.ambiguous_right})"
    return (
        f"| {level} | {cause} | {fault} | {total} | {right} | {clear} | {ambiguous} | "
        f"{found.cause_right / causes:.3f} | {rules} |"
    )


if __name__ == "__main__":
    main()
