"""Events come one by one out of any trace document, whatever the chunks, and faults name their place."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline import json_events
from moetrace_collectors.offline.json_events import EventStream

PATH = Path("trace.json")
VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.lists(st.dictionaries(st.text(max_size=6), VALUE, max_size=4), max_size=8)
REST = st.dictionaries(st.text(max_size=6).filter(lambda key: key != "traceEvents"), VALUE, max_size=3)


class SmallReads(io.BytesIO):
    """Gives a few bytes per read, so that every place is some time the end of the window."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` of the constructor."""
        return super().read(self._size)


def read(data: bytes | str, size: int = 1 << 20) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events and the rest of the document."""
    stream = EventStream(SmallReads(data.encode() if isinstance(data, str) else data, size), PATH)
    return list(stream), stream.metadata


@given(before=REST, events=EVENTS, after=REST, size=st.integers(1, 64), indent=st.sampled_from([None, 1]))
def test_same_as_reading_the_whole_document(
    before: dict[str, Any], events: list[dict[str, Any]], after: dict[str, Any], size: int, indent: int | None
) -> None:
    """Any document in any chunks gives what json.loads gives."""
    document = {**before, "traceEvents": events, **{k: v for k, v in after.items() if k not in before}}
    found, rest = read(json.dumps(document, indent=indent, ensure_ascii=False), size)
    assert found == events
    assert rest == {**document, "traceEvents": None}


@given(events=EVENTS, size=st.integers(1, 64))
def test_bare_array(events: list[dict[str, Any]], size: int) -> None:
    """The other form of a Chrome trace."""
    assert read(json.dumps(events), size) == (events, {})


def test_key_inside_a_string_or_deeper_is_not_the_array() -> None:
    """Only the document's own key counts."""
    document = '{"note": "\\"traceEvents\\": [", "inner": {"traceEvents": [1]}, "traceEvents": [{"a": 1}]}'
    assert read(document)[0] == [{"a": 1}]


def test_numbers_that_are_none() -> None:
    """Profilers write NaN and Infinity, and some print nan and inf as C does."""
    document = '{"x": nan, "traceEvents": [{"a": NaN}, {"b": Infinity}, {"c": -inf, "d": nan}, {"e": 1}]}'
    events, rest = read(document)
    assert events[2:] == [{"c": None, "d": None}, {"e": 1}]
    assert rest["x"] is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "trace expected"),
        ("7", "trace expected"),
        ("{}", '"traceEvents" expected'),
        ('{"traceEvents": 3}', '"traceEvents" expected'),
        ('{"traceEvents": [', "event 0: object or end of array expected, got end of file"),
        ('{"traceEvents": [{"a": 1}', "event 1: object or end of array expected, got end of file"),
        ('{"traceEvents": [{"a": "x', "event 0: whole JSON object expected, got end of file"),
        ('{"traceEvents": [{"a": 1} {"b": 2}]}', "event 1: comma before it expected"),
        ('{"traceEvents": [{"a": 1}, 5]}', "event 1: object expected"),
        ('{"traceEvents": [{"a": 1}, {b: 2}], "x": "' + "y" * 50 + '"}', "event 1: JSON expected"),
        ('{"traceEvents": [{"a": 1}], "x"', "outside traceEvents"),
        ('{"traceEvents": [{"a": ' + "9" * 5000 + "}]}", "event 0: numbers of sane length expected"),
        ('{"traceEvents": [{"a": ' + "[" * 100_000 + "]}", "event 0: JSON nested less deeply expected"),
        ('[{"a": 1}] {"b": 2}', "after event 1: end of file expected"),
    ],
)
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_faults_name_their_place(data: str, message: str, size: int) -> None:
    """One line: the file, the event, what was expected."""
    with pytest.raises(UsageError) as failure:
        read(data, size)
    assert message in str(failure.value)
    assert str(failure.value).startswith("trace.json:")
    assert "\n" not in str(failure.value)


def test_memory_does_not_grow_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window holds a chunk and an event, however many events have passed."""
    monkeypatch.setattr(json_events, "CHUNK_BYTES", 4096)
    one = json.dumps({"name": "x" * 100, "args": {"a": [1, 2, 3]}})
    data = ('{"traceEvents": [' + ",".join([one] * 5_000) + "]}").encode()
    stream = EventStream(io.BytesIO(data), PATH)
    longest = 0
    for _ in stream:
        longest = max(longest, len(stream._text))
    assert stream.count == 5_000
    assert longest < 3 * 4096


def test_an_event_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A string that never closes is given up at the limit and not at the end of the file."""
    monkeypatch.setattr(json_events, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(json_events, "MAX_EVENT_CHARACTERS", 5_000)
    source = io.BytesIO(b'{"traceEvents": [{"a": "' + b"x" * 1_000_000)
    with pytest.raises(UsageError, match="event 0"):
        list(EventStream(source, PATH))
    assert source.tell() < 20_000
