"""The cookbook: questions that operators ask, as SQL that ships with the package. Standard library only.

A recipe is one `.sql` file: its first comment line is the question, `-- param NAME = VALUE` lines are the
defaults of its placeholders, further comment lines are notes, and the rest is the statement. `run` has no
default: a reader takes the newest run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_PARAMETER = re.compile(r"param ([a-z_]+) = (\S+)")
_PLACEHOLDER = re.compile(r"\{([a-z_]+):[A-Za-z0-9]+\}")
NEWEST_RUN = "SELECT run_id FROM v_runs ORDER BY last_step_time DESC, run_id LIMIT 1"


class CookbookError(ValueError):
    """A recipe or a parameter that is not there; the message lists what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One question and its statement."""

    name: str
    question: str
    notes: tuple[str, ...]
    defaults: Mapping[str, str]
    """Values of placeholders by name."""
    sql: str

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the values that the statement takes, in order of first use."""
        return tuple(dict.fromkeys(_PLACEHOLDER.findall(self.sql)))

    def parameters(self, given: Mapping[str, str]) -> dict[str, str]:
        """Values of all placeholders but a `run` that is not given.

        Raises:
            CookbookError: a name that the statement does not take.
        """
        for name in given:
            if name not in self.placeholders:
                known = ", ".join(self.placeholders) or "none"
                raise CookbookError(f"recipe {self.name} takes no {name}: {known} expected")
        values = {**self.defaults, **given}
        return {name: values[name] for name in self.placeholders if name in values}


def recipes() -> tuple[Recipe, ...]:
    """All recipes by name."""
    folder = resources.files("moetrace_schemas.clickhouse") / "queries"
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple(
        _recipe(name.removesuffix(".sql"), (folder / name).read_text(encoding="utf-8")) for name in files
    )


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        CookbookError: there is none.
    """
    known = {entry.name: entry for entry in recipes()}
    found = known.get(name.replace("-", "_"))
    if found is None:
        raise CookbookError(f"no recipe {name!r} in the cookbook: {', '.join(known)}")
    return found


def _recipe(name: str, text: str) -> Recipe:
    comments: list[str] = []
    lines = text.splitlines()
    while lines and lines[0].startswith("--"):
        comments.append(lines.pop(0).removeprefix("--").strip())
    parameters = [match for match in map(_PARAMETER.fullmatch, comments) if match]
    return Recipe(
        name=name,
        question=comments[0],
        notes=tuple(line for line in comments[1:] if _PARAMETER.fullmatch(line) is None),
        defaults={match[1]: match[2] for match in parameters},
        sql="\n".join(lines).strip(),
    )
