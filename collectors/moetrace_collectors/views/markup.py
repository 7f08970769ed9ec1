"""Building HTML and SVG from Python: text is escaped unless it is markup already, so nothing can slip in.

Run ids, model and host names come from outside. They enter a page only as `str` children or attribute
values, and both are escaped here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

_VOID = frozenset({"meta", "input", "br", "hr"})


class Markup(str):
    """Text that is markup already; made by this module only, or from a module's own literal."""

    __slots__ = ()


Attribute = str | int | float | bool | None
"""None and False leave the attribute out, True writes its name alone."""


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """One element. Attribute names: a trailing underscore goes, others become hyphens (class_, data_view)."""
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Children one after the other, text escaped."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def data_block(identifier: str, data: Any) -> Markup:
    """JSON for the page's script; no value can close the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, replacement in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(character, replacement)
    return tag("script", Markup(text), type="application/json", id=identifier)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]], **attributes: Attribute) -> Markup:
    """A table whose cells are text or markup. A heading that starts with # belongs to a column of numbers."""
    names = list(headings)
    numeric = [name.startswith("#") for name in names]
    head = tag(
        "tr",
        *(
            tag("th", name.removeprefix("#"), scope="col", class_="number" if is_number else None)
            for name, is_number in zip(names, numeric, strict=True)
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, class_="number" if is_number else None)
                for cell, is_number in zip(row, numeric, strict=True)
            ),
        )
        for row in rows
    ]
    return tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", *body), **attributes),
        class_="scroll",
        tabindex=0,
    )


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = number(value) if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'
