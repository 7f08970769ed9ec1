"""What is fuzzed: for each target its valid inputs, and what becomes of one input.

`run` returns the class of the outcome: `ok`, or why it was refused. It raises only where the code under test
raised something that it does not declare, or broke a promise about what it did with the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fuzz import importer_targets, wire_targets
from fuzz.http_targets import HttpTarget, SqlTarget
from fuzz.text_targets import ConfigTarget, GuardTarget, TokenTarget
from fuzz.wal_targets import WalTarget, has_log


class Target(Protocol):
    """One entry into the code from outside."""

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def seeds(self) -> Sequence[bytes]:
        """Valid inputs."""

    @property
    def documents(self) -> Sequence[Any]:
        """Valid inputs that are JSON, parsed; their values are changed too."""

    def run(self, data: bytes) -> str:
        """The class of the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A target, and how many of a thousand inputs it gets: slow ones fewer."""

    target: Target
    per_mille: int
    slow: bool = field(default=False)


def all_targets() -> list[Share]:
    """Every target; the shares add up to a thousand and what the log gets."""
    log = [Share(target=WalTarget(), per_mille=60)] if has_log() else []
    return [
        *log,
        Share(target=wire_targets.OtlpBodyTarget(), per_mille=160),
        Share(target=wire_targets.JsonBodyTarget(), per_mille=120),
        Share(target=wire_targets.SpanTarget(), per_mille=120),
        Share(target=wire_targets.ColumnsTarget("phases"), per_mille=70),
        Share(target=wire_targets.ColumnsTarget("experts"), per_mille=60),
        Share(target=wire_targets.ColumnsTarget("traffic"), per_mille=60),
        Share(target=HttpTarget(), per_mille=120),
        Share(target=GuardTarget(), per_mille=90),
        Share(target=TokenTarget(), per_mille=40),
        Share(target=ConfigTarget(), per_mille=30),
        Share(target=importer_targets.TraceTarget(), per_mille=35, slow=True),
        Share(target=importer_targets.LoadDumpTarget(), per_mille=35, slow=True),
        Share(target=importer_targets.NsysTarget(), per_mille=20, slow=True),
        Share(target=importer_targets.MatrixTarget(), per_mille=20, slow=True),
        Share(target=importer_targets.PlacementTarget(), per_mille=10, slow=True),
        Share(target=SqlTarget(), per_mille=10, slow=True),
    ]
