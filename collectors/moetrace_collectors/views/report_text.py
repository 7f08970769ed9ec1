"""The report's accounting, and its fixed parts: styles, script, and a few words on how to read it."""

from __future__ import annotations

from importlib import resources

from moetrace_collectors.number_format import count
from moetrace_collectors.views.findings import Summary
from moetrace_collectors.views.markup import Markup, join, table, tag
from moetrace_collectors.views.run_records import RunView


def asset(name: str) -> Markup:
    """A file of this package that goes into the page as it is."""
    return Markup(resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))


def accounting_section(view: RunView, summary: Summary) -> Markup:
    """What became of everything that arrived."""
    accounting = view.accounting
    rows = [
        ("Rank steps stored", f"{accounting.rank_steps:,}", "one per rank, step and microbatch"),
        ("of them late", f"{accounting.late:,}", "arrived after their step had closed; in no verdict"),
    ]
    rows += [
        (f"Steps closed: {closed_by}", f"{steps:,}", "")
        for closed_by, steps in sorted(accounting.steps_by_closed_by.items())
    ]
    rows.append(("Warm-up steps", f"{summary.warmup_steps:,}", "joined and judged, left out of every figure"))
    rows += [
        (f"Event: {kind}", f"{events:,}", reason)
        for (kind, reason), events in sorted(accounting.events.items())
    ]
    if accounting.unattributed_rejects:
        rows.append(
            (
                "Rejected, run unknown",
                f"{accounting.unattributed_rejects:,}",
                "could not be read far enough to tell the run",
            )
        )
    missing = sorted(accounting.missing_by_rank.items(), key=lambda item: (-item[1], item[0]))
    rows += [
        (f"Missing: rank {rank}", count(steps, "step"), "joined without it") for rank, steps in missing[:16]
    ]
    if len(missing) > 16:
        rows.append(("Missing: further ranks", f"{len(missing) - 16:,}", "from fewer steps each"))
    rows += [
        (f"Counted: {kind}", f"{pairs:,}", "rows" if kind == "received" else "(token, slot) pairs")
        for kind, pairs in sorted(accounting.pairs_by_kind.items())
    ]
    verdict = (
        "Something was late, missing or rejected: see below before trusting single steps."
        if accounting.anything_lost
        else "Nothing that reached the collector was lost: no rank step was late, doubled or rejected, and "
        "no joined step misses a rank. What never reached it, it cannot know."
    )
    return join((tag("p", verdict), table(("What", "#Count", "Note"), rows)))


def how_section() -> Markup:
    """How to read the page, and how the verdict is made."""
    return asset("how_to_read.html")
