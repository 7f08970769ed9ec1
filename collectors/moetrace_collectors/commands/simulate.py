"""`moetrace simulate`: a run with known faults, judged, and how often the verdict was right."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count

if TYPE_CHECKING:
    from moetrace_collectors.model import StepVerdict, Suspect
    from moetrace_collectors.simulate import Injection, SimulatedRun, SimulatedStep

HELP = "simulate a run with injected faults and judge it"
NOISE = {"quiet": (0.01, 0.0, 0.0), "usual": (0.05, 0.05, 100_000.0), "noisy": (0.10, 1.0, 300_000.0)}
"""Log-normal sigma of work, scheduling hiccups per rank and step, their mean length in ns."""
INJECT_KEYS = ("cause", "rank", "extension", "phase", "layer", "first", "every")
SHOWN_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shape of the run, noise, faults."""
    for name, default, text in (
        ("--ranks", 8, "ranks"),
        ("--layers", 8, "MoE layers"),
        ("--steps", 100, "steps"),
        ("--experts", 64, "logical experts per layer"),
        ("--top-k", 2, "experts per token"),
        ("--tokens", 4096, "tokens per rank and step"),
        ("--ranks-per-node", 8, "ranks per node"),
    ):
        parser.add_argument(name, type=_positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--ep-size", type=_positive, metavar="N", help="ranks per EP group (all)")
    parser.add_argument(
        "--noise", choices=sorted(NOISE), default="usual", help="what no one injected (usual)"
    )
    parser.add_argument(
        "--load-sigma", type=float, default=0.1, help="log-normal sigma of expert loads (0.1)"
    )
    parser.add_argument("--missing", type=float, default=0.0, help="chance that a rank's step is lost (0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="cause=C,rank=R,extension=0.05",
        help="a fault, several allowed; also phase=, layer=, first= (step) and every= (steps). Causes: "
        "device, outside, host, routing, placement, link. extension: part of a calm step",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, judge, print; always 0: a wrong verdict is a finding and no fault of the command.

    Raises:
        UsageError: a run or a fault that cannot be simulated.
    """
    # Here and not above: help needs no numpy.
    from moetrace_collectors.simulate import Noise, SimulatedRun, simulate
    from moetrace_collectors.verdict import VerdictEngine

    spread, hiccups, hiccup_ns = NOISE[arguments.noise]
    try:
        simulated_run = SimulatedRun(
            seed=arguments.seed,
            num_ranks=arguments.ranks,
            ranks_per_node=arguments.ranks_per_node,
            ep_size=arguments.ep_size,
            num_layers=arguments.layers,
            num_experts=arguments.experts,
            top_k=arguments.top_k,
            num_tokens=arguments.tokens,
            num_steps=arguments.steps,
            load_sigma=arguments.load_sigma,
            noise=Noise(spread=spread, hiccups_per_step=hiccups, hiccup_ns=hiccup_ns),
            missing_chance=arguments.missing,
            injections=tuple(_injection(text) for text in arguments.inject),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    engine = VerdictEngine()
    judged = [(step, engine.judge(step.joined)) for step in simulate(simulated_run)]
    if arguments.json:
        json.dump(_document(simulated_run, judged), sys.stdout, indent=1)
        print()
    else:
        print("\n".join(_text(simulated_run, judged)))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: 1 or more")
    return value


def _injection(text: str) -> Injection:
    """One fault from `key=value,...`.

    Raises:
        ValueError: an unknown or missing key, or a value that is none.
    """
    from moetrace_collectors.simulate import Injection
    from moetrace_schemas.enums import Cause, Phase

    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    wrong = sorted(set(pairs) - set(INJECT_KEYS))
    absent = [key for key in INJECT_KEYS[:3] if key not in pairs]
    if wrong or absent:
        what = f"unknown key {wrong[0]!r}" if wrong else f"{absent[0]}= is missing"
        raise ValueError(f"--inject {text}: {what}; keys are {', '.join(INJECT_KEYS)}")
    try:
        return Injection(
            cause=Cause(pairs["cause"]),
            rank=int(pairs["rank"]),
            extension=float(pairs["extension"]),
            phase=Phase(pairs.get("phase", Phase.EXPERT_GEMM)),
            layer=int(pairs["layer"]) if "layer" in pairs else None,
            first_step=int(pairs.get("first", 0)),
            every=int(pairs.get("every", 1)),
        )
    except ValueError as error:
        raise ValueError(f"--inject {text}: {error}") from error


def _summary(judged: list[tuple[SimulatedStep, StepVerdict]]) -> dict[str, int]:
    from moetrace_collectors.simulated_truth import Outcome, outcome

    outcomes = [(step, verdict, outcome(step, verdict)) for step, verdict in judged]
    faulty = [(verdict, found) for step, verdict, found in outcomes if step.truth]
    calm = [verdict for step, verdict in judged if not step.truth]
    return {
        "steps": len(judged),
        "faulty_steps": len(faulty),
        "faulty_named": sum(found is Outcome.RIGHT for _, found in faulty),
        "faulty_clear": sum(v.evidence == "clear" and found is Outcome.RIGHT for v, found in faulty),
        "faulty_unclear": sum(found is Outcome.UNCLEAR for _, found in faulty),
        "clear_wrong": sum(found is Outcome.WRONG for _, _, found in outcomes),
        "clear_hiccup": sum(found is Outcome.HICCUP for _, _, found in outcomes),
        "calm_steps": len(calm),
        "calm_clear": sum(verdict.evidence == "clear" for verdict in calm),
        "calm_ambiguous": sum(verdict.evidence == "ambiguous" for verdict in calm),
    }


def _suspect(suspect: Suspect | None) -> dict[str, Any] | None:
    if suspect is None:
        return None
    return {
        "rank": suspect.rank,
        "phase": suspect.phase.value,
        "layer": suspect.layer,
        "worth_ms": suspect.worth_ns / 1e6,
        "share": suspect.share,
    }


def _document(simulated_run: SimulatedRun, judged: list[tuple[SimulatedStep, StepVerdict]]) -> dict[str, Any]:
    return {
        "ranks": simulated_run.num_ranks,
        "layers": simulated_run.num_layers,
        "seed": simulated_run.seed,
        "calm_step_ms": simulated_run.calm_step_ns / 1e6,
        "summary": _summary(judged),
        "verdicts": [
            {
                "step": verdict.step,
                "truth": [
                    {"cause": f.cause.value, "rank": f.rank, "phase": f.named_phase.value, "layer": f.layer}
                    for f in step.truth
                ],
                "evidence": verdict.evidence.value,
                "cause": verdict.cause.value,
                "suspect": _suspect(verdict.suspect),
                "runner_up": _suspect(verdict.runner_up),
                "step_ms": verdict.step_ns / 1e6,
                "reason": verdict.reason,
            }
            for step, verdict in judged
        ],
    }


def _text(simulated_run: SimulatedRun, judged: list[tuple[SimulatedStep, StepVerdict]]) -> list[str]:
    lines = [
        f"{count(simulated_run.num_ranks, 'rank')}, {count(simulated_run.num_layers, 'layer')}, seed "
        f"{simulated_run.seed}; "
        f"a calm step takes {simulated_run.calm_step_ns / 1e6:.2f} ms",
        "",
        f"{'step':>6} {'step ms':>8}  {'evidence':<13} {'rank':>4} {'layer':>5} {'phase':<12} {'cause':<10} "
        f"{'worth ms':>8}  truth",
    ]
    for step, verdict in judged[-SHOWN_STEPS:]:
        suspect = verdict.suspect
        rank = "" if suspect is None else str(suspect.rank)
        layer = "" if suspect is None else "all" if suspect.layer is None else str(suspect.layer)
        phase = "" if suspect is None else suspect.phase.value
        worth = "" if suspect is None else f"{suspect.worth_ns / 1e6:.2f}"
        truth = ", ".join(f"rank {f.rank} {f.named_phase} ({f.cause})" for f in step.truth) or "-"
        lines.append(
            f"{verdict.step:>6} {verdict.step_ns / 1e6:>8.2f}  {verdict.evidence.value:<13} {rank:>4} "
            f"{layer:>5} {phase:<12} {verdict.cause.value:<10} {worth:>8}  {truth}"
        )
    found = _summary(judged)
    lines.append("")
    if found["faulty_steps"]:
        lines += [
            f"faulty steps: {found['faulty_named']} of {found['faulty_steps']} named, "
            f"{found['faulty_clear']} clear, {found['faulty_unclear']} left unclear",
            *_why_unclear(judged),
        ]
    if found["calm_steps"]:
        lines.append(
            f"calm steps:   {found['calm_clear']} of {found['calm_steps']} clear, "
            f"{found['calm_ambiguous']} ambiguous"
        )
    lines += [
        f"clear verdicts that name a scheduling hiccup of the noise: {found['clear_hiccup']}",
        f"clear verdicts that name something else: {found['clear_wrong']}",
    ]
    return lines


def _why_unclear(judged: list[tuple[SimulatedStep, StepVerdict]]) -> list[str]:
    """The last unclear faulty step's reason: why nothing is named is worth a line."""
    from moetrace_collectors.simulated_truth import Outcome, outcome

    unclear = [
        verdict for step, verdict in judged if step.truth and outcome(step, verdict) is Outcome.UNCLEAR
    ]
    return [f"              step {unclear[-1].step}: {unclear[-1].reason}"] if unclear else []
