"""Renders the public API of moetrace as text; tests/packaging/test_public_api.py says how it is used."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import moetrace


def lines() -> Iterator[str]:
    """Every exported name with its signature; classes with their public members."""
    for name in sorted(moetrace.__all__):
        thing = getattr(moetrace, name)
        if not inspect.isclass(thing):
            yield f"def {name}{inspect.signature(thing)}"
            continue
        bases = ", ".join(base.__name__ for base in thing.__bases__)
        yield f"class {name}({bases})"
        yield from (f"    {line}" for line in members(thing))


def members(kind: type[Any]) -> Iterator[str]:
    """Enumeration members, dataclass fields, properties and methods that the class itself defines."""
    if issubclass(kind, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in kind)
        return
    if is_dataclass(kind):
        for field in fields(kind):
            default = "" if field.default is MISSING else f" = {field.default!r}"
            yield f"{field.name}: {field.type}{default}"
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"property {name}"
        elif isinstance(member, classmethod):
            yield f"classmethod {name}{inspect.signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"def {name}{inspect.signature(member)}"


if __name__ == "__main__":
    print("\n".join(lines()))
