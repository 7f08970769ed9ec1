"""Damaged inputs against all that reads from outside: no crash, no hang, every refusal declared and counted.

    python tests/fuzz/run.py --inputs 100000 --seed 1

Prints inputs per target and every class of outcome; exit code 1 where a target raised something that it does
not declare, broke a promise, or took longer than the time limit. Such inputs are kept in --keep.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / part) for part in ("", "collectors", "schemas", "dashboards", "tests")]

from fuzz.mutation import mutate, mutate_document
from fuzz.targets import Target, all_targets

LIMIT_S = 20.0
"""One input may take so long on a busy machine; what hangs takes for ever."""


class HangError(BaseException):
    """Over the time limit. No Exception, so that no code under test catches it."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of a target's inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[bytes, str]] = field(default_factory=list)
    slowest_s: float = 0.0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise HangError in the block when the time is over."""

    def over(*_: object) -> None:
        raise HangError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def inputs(target: Target, count: int, rng: random.Random) -> Iterator[bytes]:
    """The valid inputs, noise, and damaged ones."""
    yield from target.seeds[:count]
    for number in range(count - len(target.seeds)):
        if number % 50 == 49:
            yield rng.randbytes(rng.randrange(200))
        elif target.documents and number % 2:
            yield mutate_document(rng.choice(target.documents), rng)
        else:
            yield mutate(rng.choice(target.seeds), rng, target.seeds)


def fuzz(target: Target, count: int, *, seed: int, limit_s: float = LIMIT_S) -> Tally:
    """Run a target on `count` inputs; a failure does not end it."""
    tally = Tally()
    rng = random.Random(f"{seed} {target.name}")
    for data in inputs(target, count, rng):
        begun = time.perf_counter()
        try:
            with time_limit(limit_s):
                tally.outcomes[target.run(data)] += 1
        except (Exception, HangError) as error:  # noqa: BLE001 - that is what is looked for
            tally.outcomes[f"FAILED: {type(error).__name__}"] += 1
            tally.failures.append((data, "".join(traceback.format_exception(error))))
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - begun)
    return tally


def main() -> int:
    """Fuzz all targets, or those whose name holds a word."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs over all targets")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same inputs")
    parser.add_argument("--only", default="", metavar="WORD", help="targets whose name holds this")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail"
    )
    arguments = parser.parse_args()
    shares = [share for share in all_targets() if arguments.only in share.target.name]
    scale = arguments.inputs / sum(share.per_mille for share in shares)
    total, failed = 0, 0
    for share in shares:
        count = max(1, round(share.per_mille * scale))
        begun = time.perf_counter()
        tally = fuzz(share.target, count, seed=arguments.seed)
        took_s = time.perf_counter() - begun
        total += sum(tally.outcomes.values())
        failed += len(tally.failures)
        print(
            f"{share.target.name}: {sum(tally.outcomes.values())} inputs in {took_s:.1f} s, "
            f"slowest {tally.slowest_s * 1e3:.0f} ms",
            flush=True,
        )
        for outcome, number in tally.outcomes.most_common():
            print(f"    {number:8d}  {outcome}", flush=True)
        for number, (data, trace) in enumerate(tally.failures[:20]):
            arguments.keep.mkdir(parents=True, exist_ok=True)
            path = arguments.keep / f"{share.target.name.replace(' ', '_').replace(',', '')}_{number}"
            path.write_bytes(data)
            if number < 3:
                print(f"{path}:\n{trace}", flush=True)
    print(f"{total} inputs, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
