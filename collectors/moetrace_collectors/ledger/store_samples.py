"""Samples of a run from a store: one side of a comparison, or a pool of ranks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.ledger import sample_queries as queries
from moetrace_collectors.ledger.samples import Side, StepSamples
from moetrace_collectors.number_format import count
from moetrace_collectors.views.store_rows import Row, Store

MAX_STEPS = 5_000
"""Newest steps of each forward mode that are compared; more tell nothing new about p99."""
SETTLE_STEPS = 5
"""Steps behind a change that are left out: the migration itself runs beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A placement version as steps ran under it."""

    version: int
    first_step: int
    last_step: int
    steps: int
    first_ns: int
    last_ns: int


def read_epochs(store: Store, run_id: str) -> tuple[Epoch, ...]:
    """Versions in order of their first step; 0 is a placement that nobody named."""
    return tuple(
        Epoch(
            version=int(row["version"]),
            first_step=int(row["first_step"]),
            last_step=int(row["last_step"]),
            steps=int(row["steps"]),
            first_ns=int(row["first_ns"]),
            last_ns=int(row["last_ns"]),
        )
        for row in store.rows(queries.EPOCHS, {"run": run_id})
    )


def read_side(
    store: Store,
    run_id: str,
    *,
    label: str,
    version: int | None = None,
    ranks: Sequence[int] = (),
    settle_before_step: int = 0,
) -> Side:
    """Steps of a run: of one version, of some ranks, or all.

    Args:
        store: where the run is.
        run_id: the run.
        label: what the side is called.
        version: placement version; None: whatever it was.
        ranks: global ranks; none: all.
        settle_before_step: steps below it are left out.
    """
    rows = store.rows(
        queries.STEPS,
        {
            "run": run_id,
            "version": -1 if version is None else version,
            "ranks": list(ranks),
            "limit": MAX_STEPS,
        },
    )
    settled = [row for row in rows if int(row["step"]) >= settle_before_step]
    by_mode: dict[str, list[Row]] = {}
    for row in reversed(settled):
        by_mode.setdefault(str(row["forward_mode"]), []).append(row)
    [left_out] = store.rows(queries.LEFT_OUT, {"run": run_id})
    reasons = {"some ranks": int(left_out["partial"]), "a length": 0 if ranks else int(left_out["unjudged"])}
    notes = [
        f"run {run_id}: {count(number, 'step')} without {what}, in no figure"
        for what, number in reasons.items()
        if number
    ]
    return Side(
        label=label,
        version=version,
        steps={mode: _samples(found) for mode, found in by_mode.items()},
        left_out=len(rows) - len(settled),
        notes=tuple(notes),
    )


def read_pool(store: Store, run_id: str, text: str) -> tuple[int, ...]:
    """Ranks of a pool: `0-3,6`, or `model:VERSION` for all ranks that serve it.

    Raises:
        UsageError: not a pool, or the run has no such rank.
    """
    rows = store.rows(queries.RANKS, {"run": run_id})
    known = {int(row["rank"]) for row in rows}
    if text.startswith("model:"):
        wanted = text.removeprefix("model:")
        ranks = {int(row["rank"]) for row in rows if row["model_version"] == wanted}
        versions = ", ".join(sorted({str(row["model_version"]) or "(none)" for row in rows}))
        if not ranks:
            raise UsageError(f"pool {text}: no rank of run {run_id} serves it; model versions are {versions}")
        return tuple(sorted(ranks))
    ranks = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            ranks.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise UsageError(
                f"pool {text}: ranks as in 0-3,6 or a model version as in model:v2 expected"
            ) from None
    if not ranks or not ranks <= known:
        listed = f"0 to {max(known)}" if known else "none"
        raise UsageError(f"pool {text}: run {run_id} has ranks {listed}")
    return tuple(sorted(ranks))


def _samples(rows: Sequence[Row]) -> StepSamples:
    def column(name: str, kind: Any = np.float64) -> Any:
        return np.array([row[name] for row in rows], dtype=kind)

    return StepSamples(
        step=column("step", np.int64),
        time_ns=column("time_ns", np.int64),
        step_ns=column("step_ns"),
        rows=column("rows"),
        pairs=column("pairs"),
        lost_pairs=column("lost_pairs"),
        sent_rows=column("sent_rows"),
        cross_rows=column("cross_rows"),
    )
