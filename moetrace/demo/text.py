"""Real text for the demo: files of the Python installation, as a prose cohort and a code cohort.

Prose is the language reference that ships as pydoc topics; code is the standard library's source. A
token is a word or a sign, hashed into the vocabulary: so routing follows what the text is about, with
the skew that real text has, and nothing is drawn at random.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

COHORTS = ("prose", "code")
PADDING_ID = 0
FIRST_ID = 3
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")
_LONGEST_FILE = 60_000


def prose_documents() -> list[str]:
    """Topics of the language reference, longest first."""
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=lambda text: (-len(text), text))[:64]


def code_documents() -> list[str]:
    """Modules of the standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")[:_LONGEST_FILE]
        if len(text) > 4_000:
            documents.append(text)
    return documents[:64]


DOCUMENTS: dict[str, Callable[[], list[str]]] = {"prose": prose_documents, "code": code_documents}


def tokenize(text: str, vocabulary: int) -> list[int]:
    """Words, signs and line ends as ids in [FIRST_ID, vocabulary)."""
    span = vocabulary - FIRST_ID
    return [FIRST_ID + zlib.crc32(token.encode()) % span for token in _TOKEN.findall(text)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, S] and attention mask [B, S] (0 = padding)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cohort: str


class Batches:
    """Batches of one rank: step by step the next passages of its cohort's documents."""

    def __init__(self, rank: int, vocabulary: int, batch: int, length: int) -> None:
        self._rank, self._batch, self._length = rank, batch, length
        self._tokens = {
            cohort: [tokenize(text, vocabulary) for text in documents()]
            for cohort, documents in DOCUMENTS.items()
        }

    def at(self, step: int) -> Batch:
        """The batch of a step; the cohort alternates over steps and over ranks."""
        import torch

        cohort = COHORTS[(self._rank + step) % len(COHORTS)]
        documents = self._tokens[cohort]
        ids = torch.full((self._batch, self._length), PADDING_ID, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row in range(self._batch):
            passage = self._rank * 1_009 + step * self._batch + row
            tokens = documents[passage % len(documents)]
            start = (passage // len(documents) * self._length) % max(1, len(tokens) - 16)
            # Passages end where their document ends, so that batches hold padding as real ones do.
            piece = tokens[start : start + self._length - 8 * (passage % 4)]
            ids[row, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
            mask[row, : len(piece)] = 1
        return Batch(ids, mask, cohort)
