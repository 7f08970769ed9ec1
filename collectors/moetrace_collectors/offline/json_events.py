"""The events of a Chrome trace one by one, from a stream of bytes, in bounded memory.

A trace file is `{ ..., "traceEvents": [ event, event, ... ], ... }` or a bare `[ event, ... ]`. Only the
array is large. Each event is decoded where it lies in a window of the file with the decoder of the
standard library, so whatever it accepts is accepted here, NaN and Infinity (which profilers do write)
included; what stands before and after the array is joined and read as one small document.

Measured on a 200 MB trace of 822,500 events (benchmarks/analyze.py measures the whole command): 87 MB/s and
33 MB of memory this way, 76 MB/s and 28 MB with ijson on its C backend, which does not take NaN and
gives the rest of the document only by a second pass; 18 MB/s and 1,063 MB for json.load.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from moetrace_collectors.offline.source import bad_file, parse_json

CHUNK_BYTES = 1 << 20
MAX_EVENT_CHARACTERS = 64 << 20
"""One event, or what stands before the array, is never longer; a longer one is no trace."""
TAIL_CHARACTERS = 64 << 20

_BLANK = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n]*,[ \t\r\n]*(?=\{)")
_ARRAY_KEY = re.compile(r'"traceEvents"\s*:\s*\[')
_BARE_NAN = re.compile(r"(:\s*)-?(?:nan|inf)\b")
_decode = json.JSONDecoder().raw_decode


class EventStream:
    """Iterate once over the events; `metadata` is complete when the iteration is over."""

    def __init__(
        self, stream: IO[bytes], path: Path, *, progress: Callable[[int], None] | None = None
    ) -> None:
        self._stream = stream
        self._path = path
        self._progress = progress
        self._text = ""
        self._at = 0
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.metadata: dict[str, Any] = {}
        """What the document holds beside the events; empty for a bare array."""
        self.count = 0
        """Events read so far."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every event.

        Raises:
            UsageError: not such a document; the message names the event.
        """
        head = self._head()
        while self._next_is_event():
            yield self._event()
            # The short way through nearly every event: it lies whole in the window, and so does the
            # brace of the next one. Anything else (window's end, array's end, faults) takes the long way.
            while (match := _BETWEEN.match(self._text, self._at)) is not None:
                try:
                    event, end = _decode(self._text, match.end())
                except (ValueError, RecursionError):
                    break
                self._at = end
                self.count += 1
                yield event
        self._at += 1
        tail = self._tail()
        if head is None:
            if tail.strip():
                raise bad_file(self._path, f"after event {self.count}", "end of file expected")
            return
        self.metadata = self._rest(head, tail)

    def _head(self) -> str | None:
        """Move to the first event; returns the text before the array (None for a bare array)."""
        self._more()
        self._text = self._text.lstrip("\ufeff")
        start = self._skip_blanks()
        if self._text[start : start + 1] == "[":
            self._at = start + 1
            return None
        if self._text[start : start + 1] != "{":
            raise bad_file(self._path, "", 'trace expected: a JSON object with "traceEvents", or an array')
        while True:
            for match in _ARRAY_KEY.finditer(self._text):
                # The key may also stand inside a string or in a nested object: it is the document's own
                # only where what stands before it closes as an object.
                head = self._text[: match.start()]
                if _closes(head):
                    self._at = match.end()
                    return head
            if len(self._text) > MAX_EVENT_CHARACTERS or not self._more():
                raise bad_file(self._path, "", 'array "traceEvents" expected')

    def _next_is_event(self) -> bool:
        """Move to the next event; False at the end of the array."""
        start = self._skip_blanks()
        character = self._text[start : start + 1]
        if character == "," and self.count:
            start = self._skip_blanks(1)
            character = self._text[start : start + 1]
        elif self.count and character == "{":
            raise self._broken("comma before it expected")
        if character == "]":
            self._at = start
            return False
        if character != "{":
            what = "object expected" if character else "object or end of array expected, got end of file"
            raise self._broken(what)
        self._at = start
        return True

    def _event(self) -> dict[str, Any]:
        repaired = False
        while True:
            try:
                event, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated string")
                if near_end and len(self._text) - self._at <= MAX_EVENT_CHARACTERS and self._more():
                    continue
                if not repaired:
                    # Some profilers write nan and inf as C prints them.
                    self._text = self._text[: self._at] + _BARE_NAN.sub(r"\1null", self._text[self._at :])
                    repaired = True
                    continue
                what = (
                    "whole JSON object expected, got end of file"
                    if near_end
                    else f"JSON expected ({error.msg})"
                )
                raise self._broken(what) from error
            except RecursionError as error:
                raise self._broken("JSON nested less deeply expected") from error
            except ValueError as error:  # an integer of thousands of digits
                raise self._broken("numbers of sane length expected") from error
            self._at = end
            self.count += 1
            return event  # type: ignore[no-any-return]  # it starts with a brace

    def _skip_blanks(self, more: int = 0) -> int:
        self._at += more
        while True:
            match = _BLANK.match(self._text, self._at)
            assert match is not None  # the pattern matches the empty string
            self._at = match.end()
            if self._at < len(self._text) or not self._more():
                return self._at

    def _more(self) -> bool:
        """Read on, dropping what has been decoded; False at the end of the file."""
        if self._ended:
            return False
        chunk = self._stream.read(CHUNK_BYTES)
        self._ended = not chunk
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=self._ended)
        self._at = 0
        if self._progress is not None:
            self._progress(len(chunk))
        return not self._ended

    def _tail(self) -> str:
        while self._more():
            if len(self._text) > TAIL_CHARACTERS:
                raise bad_file(
                    self._path, f"after event {self.count}", "a short rest of the document expected"
                )
        return self._text[self._at :]

    def _rest(self, head: str, tail: str) -> dict[str, Any]:
        text = f'{head}"traceEvents":null{tail}'
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            text = _BARE_NAN.sub(r"\1null", text)
        rest = parse_json(text, self._path, place="outside traceEvents")
        if not isinstance(rest, dict):
            raise bad_file(self._path, "", "JSON object expected")
        return rest

    def _broken(self, what: str) -> Exception:
        return bad_file(self._path, f"event {self.count}", what)


def _closes(head: str) -> bool:
    """Whether `head` is the beginning of an object and stands between two of its own members."""
    text = head.rstrip()
    if text.endswith(","):
        text = text[:-1]
    elif not text.endswith("{"):
        return False
    try:
        json.loads(text + "}")
    except (ValueError, RecursionError):
        try:
            json.loads(_BARE_NAN.sub(r"\1null", text) + "}")
        except (ValueError, RecursionError):
            return False
    return True
