"""How many messages an OTLP request in protobuf holds, counted before it is parsed. Pure.

A parser turns an empty span, two bytes on the wire, into some hundred bytes of memory, and an empty
attribute likewise: 64 MB of them, which gzip makes 64 kB of, would take gigabytes. So the wire format is
walked first, without building anything, and the walk ends at the budget.
"""

from __future__ import annotations

MAX_SPANS = 10_000
"""Spans of one request, unless configured otherwise."""
MAX_MESSAGES = 250_000
"""Messages of every kind in one request: spans, attributes, values, events, links."""
SMALL_BYTES = 64
"""A value up to this long is one message to this count: what it may hold is little."""

_REQUEST, _RESOURCE_SPANS, _RESOURCE, _SCOPE_SPANS, _SCOPE, _SPAN, _EVENT, _LINK = range(8)
_KEY_VALUE, _ANY_VALUE, _ARRAY, _KEY_VALUES, _STATUS, _ENTITY = range(8, 14)
_CHILDREN: tuple[dict[int, int], ...] = (
    {1: _RESOURCE_SPANS},
    {1: _RESOURCE, 2: _SCOPE_SPANS},
    {1: _KEY_VALUE, 3: _ENTITY},
    {1: _SCOPE, 2: _SPAN},
    {3: _KEY_VALUE},
    {9: _KEY_VALUE, 11: _EVENT, 13: _LINK, 15: _STATUS},
    {3: _KEY_VALUE},
    {4: _KEY_VALUE},
    {2: _ANY_VALUE},
    {5: _ARRAY, 6: _KEY_VALUES},
    {1: _ANY_VALUE},
    {1: _KEY_VALUE},
    {},
    {},
)
"""Message kind -> field number -> kind of the message in it (OTLP trace v1)."""
_MAX_DEPTH = 64


class WireError(ValueError):
    """Not protobuf, or cut short."""


class TooManyMessagesError(ValueError):
    """Over the budget."""


class TooDeepError(ValueError):
    """Values nested deeper than anything that is sent on purpose."""


def check_budget(body: bytes, *, max_spans: int, max_messages: int = MAX_MESSAGES) -> int:
    """Count the spans of a request.

    Raises:
        TooManyMessagesError: more spans or messages than may be.
        TooDeepError: nested too deep.
        WireError: a field does not decode.
    """
    spans = messages = 0
    # (kind, position, end), innermost last; a list and not recursion, so that depth costs nothing.
    open_messages: list[tuple[int, int, int]] = [(_REQUEST, 0, len(body))]
    while open_messages:
        kind, position, end = open_messages.pop()
        children = _CHILDREN[kind]
        while position < end:
            # Numbers of one byte, nearly all of them, are read in place: this loop is a tenth of a request.
            if (tag := body[position]) < 0x80:
                position += 1
            else:
                tag, position = _varint(body, position, end)
            wire_type = tag & 7
            if wire_type == 2:
                if position < end and (length := body[position]) < 0x80:
                    position += 1
                else:
                    length, position = _varint(body, position, end)
                start, position = position, position + length
                if position > end:
                    raise WireError("a field is longer than its message")
                child = children.get(tag >> 3)
                if child is None:
                    continue
                messages += 1
                if child == _SPAN:
                    spans += 1
                    if spans > max_spans:
                        raise TooManyMessagesError(f"more than {max_spans} spans in one request")
                if messages > max_messages:
                    raise TooManyMessagesError(f"more than {max_messages} messages in one request")
                if length > SMALL_BYTES or child < _KEY_VALUE:
                    open_messages.append((kind, position, end))
                    if len(open_messages) > _MAX_DEPTH:
                        raise TooDeepError(f"values nested deeper than {_MAX_DEPTH}")
                    kind, position, end = child, start, position
                    children = _CHILDREN[kind]
            elif wire_type == 0:
                _, position = _varint(body, position, end)
            elif wire_type == 1:
                position += 8
            elif wire_type == 5:
                position += 4
            else:
                # Groups, which OTLP has never used.
                raise WireError(f"wire type {wire_type}")
            if position > end:
                raise WireError("cut short")
    return spans


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift >= 70:
            raise WireError("a number is too long")
    raise WireError("cut short")
