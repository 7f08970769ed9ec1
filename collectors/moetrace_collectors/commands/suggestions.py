"""What commands suggest to type next: one spelling of each suggestion."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

from moetrace_schemas.identity import RUN_ID_PATTERN

_COLUMNS = "step, evidence, rank, layer, phase, cause, worth_ns"
_ORDER = "ORDER BY worth_ns DESC LIMIT 10"


def program() -> str:
    """How to call this command again: by name where the shell finds it, else as it was called."""
    return "moetrace" if shutil.which("moetrace") else shlex.quote(os.path.relpath(sys.argv[0]))


def worst_steps(source: str, run_id: str | None = None) -> str:
    """The command that lists the costliest steps.

    Args:
        source: Options that say where the run is, quoted for a shell.
        run_id: Which run, where the store may hold others.
    """
    # Another id than the wire's cannot be quoted for SQL and shell at once; the query still works without.
    named = run_id is not None and RUN_ID_PATTERN.fullmatch(run_id) is not None
    where = f"WHERE run_id = '{run_id}' " if named else ""
    return f'{program()} query {source} "SELECT {_COLUMNS} FROM step_verdicts {where}{_ORDER}"'
