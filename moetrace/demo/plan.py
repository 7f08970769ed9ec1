"""What a demo run will do: model shapes and injected delays, checked before anything starts.

Standard library only, so that `python -m moetrace.demo.plan` answers at once: it prints the plan as
JSON, or one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from moetrace_schemas.enums import Phase
from moetrace_schemas.wording import count

INJECTABLE = (
    Phase.OUTSIDE,
    Phase.ROUTER,
    Phase.PERMUTE,
    Phase.DISPATCH,
    Phase.EXPERT_GEMM,
    Phase.COMBINE,
    Phase.UNPERMUTE,
)
"""Phases that every demo model can be slowed in; shared_expert where the model has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A small random-weight model of a real architecture."""

    name: str
    layers: tuple[int, ...]
    """Numbers of its MoE layers."""
    num_layers: int
    hidden: int
    expert_width: int
    num_experts: int
    top_k: int
    shared_expert: bool = False


MODELS = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="olmoe",
            layers=(0, 1, 2, 3),
            num_layers=4,
            hidden=128,
            expert_width=128,
            num_experts=32,
            top_k=4,
        ),
        ModelSpec(
            name="qwen3",
            layers=(0, 1, 2, 3),
            num_layers=4,
            hidden=128,
            expert_width=96,
            num_experts=64,
            top_k=8,
        ),
        ModelSpec(
            name="mixtral",
            layers=(0, 1, 2, 3),
            num_layers=4,
            hidden=128,
            expert_width=256,
            num_experts=8,
            top_k=2,
        ),
        ModelSpec(
            name="deepseek_v3",
            layers=(1, 2, 3),
            num_layers=4,
            hidden=128,
            expert_width=96,
            num_experts=32,
            top_k=4,
            shared_expert=True,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A delay on one rank: `delay_ms` in `phase`, in one layer or in every one, in every n-th step."""

    rank: int
    phase: Phase
    delay_ms: float
    layer: int | None = None
    every: int = 1


class PlanError(ValueError):
    """A wrong demo option; the message names it and what is allowed."""


def parse_injection(text: str, spec: ModelSpec, ranks: int) -> Injection:
    """`rank=2,phase=expert_gemm,delay_ms=30[,layer=1][,every=1]`.

    Raises:
        PlanError: an unknown key, or a rank, phase or layer that does not exist (valid ones listed).
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, separator, value = part.strip().partition("=")
        if not separator or key not in ("rank", "phase", "delay_ms", "layer", "every"):
            raise PlanError(
                f"--inject {text}: {part.strip()!r} is not one of rank=, phase=, delay_ms=, layer=, every="
            )
        if key in fields:
            raise PlanError(f"--inject {text}: {key} is given twice")
        fields[key] = value
    for key in ("rank", "phase", "delay_ms"):
        if key not in fields:
            raise PlanError(f"--inject {text}: {key}= is missing (rank=2,phase=expert_gemm,delay_ms=30)")
    phases = [*INJECTABLE, *([Phase.SHARED_EXPERT] if spec.shared_expert else [])]
    if fields["phase"] not in phases:
        raise PlanError(f"--inject phase={fields['phase']}: {spec.name} has {', '.join(phases)}")
    rank = _whole(text, "rank", fields["rank"])
    if not 0 <= rank < ranks:
        raise PlanError(f"--inject rank={rank}: this run has ranks 0 to {ranks - 1}")
    layer = _whole(text, "layer", fields["layer"]) if "layer" in fields else None
    if layer is not None and layer not in spec.layers:
        raise PlanError(
            f"--inject layer={layer}: {spec.name} has MoE layers {', '.join(map(str, spec.layers))}"
        )
    every = _whole(text, "every", fields.get("every", "1"))
    if every < 1:
        raise PlanError(f"--inject every={every}: 1 or more expected")
    try:
        delay_ms = float(fields["delay_ms"])
    except ValueError:
        raise PlanError(f"--inject delay_ms={fields['delay_ms']}: milliseconds expected") from None
    if not 0 < delay_ms <= 10_000:
        raise PlanError(f"--inject delay_ms={fields['delay_ms']}: more than 0 and at most 10000 expected")
    return Injection(rank=rank, phase=Phase(fields["phase"]), delay_ms=delay_ms, layer=layer, every=every)


def _whole(text: str, key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PlanError(f"--inject {text}: {key}={value}: a whole number expected") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked demo run."""

    model: ModelSpec
    ranks: int
    steps: int
    injections: tuple[Injection, ...]


def make_plan(model: str, ranks: int, steps: int, injections: list[str]) -> Plan:
    """Check the options of a demo run.

    Raises:
        PlanError: one is wrong; the message names it and what is allowed.
    """
    if model not in MODELS:
        raise PlanError(f"--model {model}: one of {', '.join(MODELS)} expected")
    spec = MODELS[model]
    if ranks < 1 or spec.num_experts % ranks:
        fitting = [str(n) for n in range(1, spec.num_experts + 1) if spec.num_experts % n == 0]
        raise PlanError(
            f"--ranks {ranks}: {model} has {count(spec.num_experts, 'expert')}; one of {', '.join(fitting)}"
        )
    if not 1 <= steps <= 100_000:
        raise PlanError(f"--steps {steps}: 1 to 100000 expected")
    return Plan(
        model=spec,
        ranks=ranks,
        steps=steps,
        injections=tuple(parse_injection(text, spec, ranks) for text in injections),
    )


def main() -> int:
    """Print the plan as JSON; exit code 2 with one line where an option is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--inject", action="append", default=[])
    options = parser.parse_args()
    try:
        plan = make_plan(options.model, options.ranks, options.steps, options.inject)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
