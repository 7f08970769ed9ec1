"""Which placement epoch of a run is read: slots, ranks and rows of two epochs are never in one sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load import store_queries as queries
from moetrace_collectors.views.store_rows import Row, Store

ALL_STEPS = ((0,), (2**63 - 1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEpoch:
    """One placement version of a run, and the views (forward mode and cohort) that were counted under it."""

    version: int
    """0: nobody told a version."""
    firsts: tuple[int, ...]
    """First step of each stay; a version that was rolled back to has several."""
    lasts: tuple[int, ...]
    views: tuple[Row, ...]
    warnings: tuple[str, ...]
    """Which one was taken, where there are several."""

    @property
    def values(self) -> dict[str, int | str | list[int]]:
        """Placeholders of the queries that read its steps."""
        return {"firsts": list(self.firsts), "lasts": list(self.lasts)}


def read_epoch(store: Store, run_id: str, version: int | None) -> RunEpoch:
    """The epoch asked for, else the newest one with expert counts.

    Raises:
        UsageError: the run has no such epoch, or no counts in it.
    """
    rows = store.rows(queries.STAYS, {"run": run_id})
    stays = {int(row["version"]): row for row in rows}
    listed = ", ".join(map(str, sorted(stays)))
    if version is not None and version not in stays:
        raise UsageError(
            f"--epoch {version}: run {run_id} has no step under it: versions are {listed or '-'}"
        )
    newest = sorted(stays, key=lambda number: -max(stays[number]["lasts"]))
    for candidate in newest if version is None else [version]:
        firsts, lasts = ALL_STEPS if len(stays) == 1 else _edges(stays[candidate])
        views = store.rows(queries.VIEWS, {"run": run_id, "firsts": list(firsts), "lasts": list(lasts)})
        if views:
            return RunEpoch(
                version=candidate,
                firsts=firsts,
                lasts=lasts,
                views=tuple(views),
                warnings=_said(store, run_id, candidate, listed, several=len(stays) > 1, asked=version),
            )
    where = "" if version is None else f" under placement version {version}"
    raise UsageError(
        f"run {run_id!r} has no expert counts{where} outside of warm-up steps: record more steps, or switch "
        "counting on"
    )


def _edges(stay: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(int(step) for step in stay["firsts"]), tuple(int(step) for step in stay["lasts"])


def _said(
    store: Store, run_id: str, version: int, listed: str, *, several: bool, asked: int | None
) -> tuple[str, ...]:
    if not several:
        return ()
    which = "as asked for" if asked is not None else "the newest with counts (--epoch for another)"
    said = [f"the run had placement versions {listed}: figures are of version {version} alone, {which}"]
    counted = store.rows(queries.EPOCHS, {"run": run_id})
    if slots := _slots_for_experts(counted):
        said.append(slots)
    return tuple(said)


def _slots_for_experts(rows: Sequence[Row]) -> str:
    """A warning where placement epochs count different numbers of experts; empty where they agree."""
    experts = {int(row["version"]): int(row["experts"]) for row in rows}
    if len(set(experts.values())) < 2:
        return ""
    told = ", ".join(f"{count} under version {version}" for version, count in experts.items())
    return (
        f"placement epochs count different numbers of experts ({told}): some counts are of slots whose map "
        "was never announced; announce it (moetrace.placement)"
    )
