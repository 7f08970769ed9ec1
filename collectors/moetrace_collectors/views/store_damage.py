"""What the engine found damaged in a store and set aside: rows in no figure, and not to be taken for none."""

from __future__ import annotations

from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import count
from moetrace_collectors.views import store_queries as queries
from moetrace_collectors.views.store_rows import Store

MOST_NAMED = 4
"""Tables in the sentence."""


def damage_of(store: Store) -> str:
    """One sentence, without an end; empty where nothing is damaged, or the store does not let us look."""
    try:
        rows = store.rows(queries.DAMAGED, {})
    except UsageError:
        return ""  # a server may keep its system tables from readers
    if not rows:
        return ""
    parts = sum(int(row["parts"]) for row in rows)
    names = [str(row["damaged"]) for row in rows]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    tables = ", ".join(names[:MOST_NAMED]) + more
    return (
        f"{count(parts, 'damaged part')} of {tables} did not read and lie aside (detached/ in the store): "
        "their rows are in no figure"
    )
