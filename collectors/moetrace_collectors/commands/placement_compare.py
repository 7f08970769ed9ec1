"""`moetrace placement compare`: steps before and after a change, two pools of ranks, or two runs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger.arguments import add_store_arguments, open_store

if TYPE_CHECKING:
    from moetrace_collectors.ledger.comparison import Thresholds
    from moetrace_collectors.ledger.samples import Side
    from moetrace_collectors.views.store_rows import Store

EXIT_CODES = {"accepted": 0, "regressed": 1, "not_enough_evidence": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which two sides, thresholds, serving records."""
    add_store_arguments(parser)
    sides = parser.add_argument_group("sides (default: the two newest placement versions of the run)")
    sides.add_argument("--before", type=int, metavar="VERSION", help="placement version to go back to")
    sides.add_argument("--after", type=int, metavar="VERSION", help="placement version to judge")
    sides.add_argument("--pool", metavar="RANKS", help="canary: ranks to judge, as 0-3,6 or model:VERSION")
    sides.add_argument("--against", metavar="RANKS", help="ranks that it is compared with, at the same time")
    sides.add_argument("--canary", metavar="RUN", help="a run to judge against --run, at the same time")
    parser.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="serving records, CSV or JSON: time_unix_s or placement_version, ttft_ms, tpot_ms, failed",
    )
    parser.add_argument(
        "--max-slowdown", type=_part, metavar="PART", help="p95 may rise by (default: as announced, else 0.1)"
    )
    parser.add_argument(
        "--max-errors",
        type=_part,
        metavar="PART",
        help="error rate may rise by (default: as announced, 0.02)",
    )
    parser.add_argument(
        "--settle", type=_whole, default=5, metavar="STEPS", help="left out behind a change (default: 5)"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the verdict into the ledger, as a row of event judged"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Compare; 0 accepted, 1 regressed, 3 not enough evidence.

    Raises:
        UsageError: a run, version or pool does not exist, or sides are named twice.
    """
    from moetrace_collectors.ledger.comparison import compare
    from moetrace_collectors.ledger.comparison_document import comparison_document, comparison_text
    from moetrace_collectors.ledger.samples import at_the_same_time
    from moetrace_collectors.views.store_reader import choose_run

    by_pool = arguments.pool is not None or arguments.against is not None
    by_version = arguments.before is not None or arguments.after is not None
    if by_pool + by_version + (arguments.canary is not None) > 1:
        raise UsageError(
            "give versions (--before, --after), pools (--pool, --against) or --canary, one of them"
        )
    if by_pool and (arguments.pool is None or arguments.against is None):
        raise UsageError(
            "--pool and --against belong together: the ranks to judge, and those to compare with"
        )
    if arguments.requests is not None and (by_pool or arguments.canary is not None):
        raise UsageError("--requests: records are assigned to placement versions; leave it out with pools")
    if arguments.record and (by_pool or arguments.canary is not None):
        raise UsageError(
            "--record: a verdict belongs to a placement version; leave it out with pools and runs"
        )
    with open_store(arguments) as store:
        run_id = choose_run(store, arguments.run_id)
        if by_pool:
            before, after = at_the_same_time(*_pools(store, run_id, arguments))
        elif arguments.canary is not None:
            canary = choose_run(store, arguments.canary)
            before, after = at_the_same_time(_run(store, run_id), _run(store, canary))
        else:
            before, after = _versions(store, run_id, arguments)
        limits, rollback = _limits(store, run_id, after.version, arguments)
    result = compare(before, after, limits, rollback_version=rollback)
    found = comparison_document(result, run_id=run_id)
    if arguments.json:
        sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
    else:
        sys.stdout.write(comparison_text(result))
    if arguments.record:
        assert after.version is not None
        _record(arguments, found, run_id, after.version)
    return EXIT_CODES[result.verdict.value]


def _record(arguments: argparse.Namespace, document: dict[str, Any], run_id: str, version: int) -> None:
    from moetrace_collectors.ledger.verdict_record import record_verdict
    from moetrace_collectors.ledger.writing import write_target

    sys.stdout.flush()
    row = record_verdict(
        write_target(arguments), document, run_id=run_id, version=version, database=arguments.database
    )
    print(
        f"row {row.sequence} of the ledger of run {run_id}: {row.verdict.replace('_', ' ')}", file=sys.stderr
    )


def _pools(store: Store, run_id: str, arguments: argparse.Namespace) -> tuple[Side, Side]:
    from moetrace_collectors.ledger.store_samples import read_pool, read_side

    against = read_pool(store, run_id, arguments.against)
    pool = read_pool(store, run_id, arguments.pool)
    if set(pool) & set(against):
        raise UsageError(
            f"--pool {arguments.pool} and --against {arguments.against} share rank "
            f"{min(set(pool) & set(against))}: give pools of different ranks"
        )
    return (
        read_side(store, run_id, label=f"ranks {arguments.against}", ranks=against),
        read_side(store, run_id, label=f"ranks {arguments.pool}", ranks=pool),
    )


def _run(store: Store, run_id: str) -> Side:
    from moetrace_collectors.ledger.store_samples import read_side

    return read_side(store, run_id, label=f"run {run_id}")


def _versions(store: Store, run_id: str, arguments: argparse.Namespace) -> tuple[Side, Side]:
    from moetrace_collectors.ledger.request_records import of_version, read_requests, samples_of
    from moetrace_collectors.ledger.store_samples import read_epochs, read_side

    epochs = {epoch.version: epoch for epoch in read_epochs(store, run_id)}
    listed = ", ".join(map(str, epochs)) or "none"
    in_order = list(epochs)
    after = arguments.after if arguments.after is not None else (in_order[-1] if in_order else None)
    if after not in epochs:
        raise UsageError(f"run {run_id} has no step under version {after}: versions are {listed}")
    earlier = in_order[: in_order.index(after)]
    before = arguments.before if arguments.before is not None else (earlier[-1] if earlier else None)
    if before is None:
        raise UsageError(
            f"run {run_id} ran under version {after} only: nothing to compare with; announce versions with "
            "moetrace.placement(version, ...)"
        )
    if before not in epochs or before == after:
        raise UsageError(f"--before {before}: another version than {after} expected, one of {listed}")
    sides = []
    for version in (before, after):
        epoch = epochs[version]
        # The first version of a run did not come about by a change.
        settles = arguments.settle if epoch.first_step > min(e.first_step for e in epochs.values()) else 0
        sides.append(
            read_side(
                store,
                run_id,
                label=f"version {version}",
                version=version,
                settle_before_step=epoch.first_step + settles,
            )
        )
    if arguments.requests is not None:
        records = read_requests(arguments.requests)
        for at, version in enumerate((before, after)):
            epoch = epochs[version]
            chosen = of_version(records, version, first_ns=epoch.first_ns, last_ns=epoch.last_ns)
            sides[at] = replace(sides[at], requests=samples_of(chosen))
        if sides[0].requests is None or sides[1].requests is None:
            bare = before if sides[0].requests is None else after
            raise UsageError(
                f"{arguments.requests}: no record belongs to version {bare}: check time_unix_s and "
                "placement_version"
            )
    return sides[0], sides[1]


def _limits(
    store: Store, run_id: str, version: int | None, arguments: argparse.Namespace
) -> tuple[Thresholds, int | None]:
    """Thresholds as given, else as announced, else the defaults; and the announced rollback target."""
    from moetrace_collectors.ledger import ledger_rows
    from moetrace_collectors.ledger.comparison import Thresholds

    told: dict[str, float] = {}
    rollback = None
    if version is not None:
        rows = store.rows(ledger_rows.OF_VERSION, {"run": run_id, "version": version})
        if rows:
            row = ledger_rows.ledger_row(rows[-1])
            terms = json.loads(row.document).get("terms", {})
            told = {name: float(terms[name]) for name in ("max_slowdown", "max_error_rate") if name in terms}
            rollback = row.rollback_version or None
    if arguments.max_slowdown is not None:
        told["max_slowdown"] = arguments.max_slowdown
    if arguments.max_errors is not None:
        told["max_error_rate"] = arguments.max_errors
    return Thresholds(**told), rollback


def _part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"a part of 0 or more expected, as in 0.1, got {text!r}")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"a whole number of 0 or more expected, got {text!r}")
    return value
