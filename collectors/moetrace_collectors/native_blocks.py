"""Blocks of FORMAT Native as newer protocol versions want them, as a server writes them for such a client.

The embedded engine writes Native for version 0 and has no way to ask for another. Go's driver, and with it
Grafana's ClickHouse data source over HTTP, asks for one that differs in two places::

    version 0       columns, rows,            name, type,       values, name, type,       values ...
    from 54,454     info, columns, rows,      name, type, 0x00, values, name, type, 0x00, values ...

So the end of each column's values must be found, which their type tells. Pure.
"""

from __future__ import annotations

import re
import struct

from moetrace_collectors.errors import CollectorError

FIRST_VERSION = 54_454
"""Protocol version from which a column says whether its values are serialised in a custom way."""
_BLOCK_INFO = b"\x01\x00\x02\xff\xff\xff\xff\x00"
"""Field 1 (overflow rows): no. Field 2 (bucket): -1, none. End."""
_NOT_CUSTOM = b"\x00"

_WIDTHS = {
    **dict.fromkeys(("UInt8", "Int8", "Bool", "Enum8", "Nothing"), 1),
    **dict.fromkeys(("UInt16", "Int16", "Enum16", "Date", "BFloat16"), 2),
    **dict.fromkeys(("UInt32", "Int32", "Float32", "DateTime", "Date32", "IPv4", "Time"), 4),
    **dict.fromkeys(("UInt64", "Int64", "Float64", "DateTime64", "Time64"), 8),
    **dict.fromkeys(("UInt128", "Int128", "UUID", "IPv6"), 16),
    **dict.fromkeys(("UInt256", "Int256"), 32),
}
"""Bytes of a value, by type."""
_DECIMAL_WIDTHS = ((9, 4), (18, 8), (38, 16), (76, 32))
"""Digits up to which a Decimal takes so many bytes."""
_FIELD_NAME = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*|`(?:[^`\\]|\\.)*`) (?=[A-Z])")
_KEY_WIDTH = 0xFF
"""Bits of a LowCardinality column's flags that say how wide its keys are: 1 << them."""


class NativeBlockError(CollectorError):
    """A result cannot be written for this protocol version; the message says which column and what to do."""


def with_block_info(data: bytes) -> bytes:
    """The same blocks for clients of FIRST_VERSION and later.

    Raises:
        NativeBlockError: a column of a type that is not known here.
    """
    reader = _Reader(data)
    parts: list[bytes] = []
    done = 0  # bytes of `data` that are in `parts`
    while done < len(data):
        parts.append(_BLOCK_INFO)
        num_columns, num_rows = reader.number(), reader.number()
        for _ in range(num_columns):
            name, type_name = reader.text(), reader.text()
            parts += (data[done : reader.at], _NOT_CUSTOM)
            done = reader.at
            if num_rows:
                try:
                    reader.skip_prefix(type_name)
                    reader.skip(type_name, num_rows)
                except _UnknownTypeError as error:
                    raise NativeBlockError(
                        f"column {name}: {error} cannot be sent to this client, convert it with toString()"
                    ) from error
        parts.append(data[done : reader.at])
        done = reader.at
    return b"".join(parts)


class _UnknownTypeError(Exception):
    pass


class _Reader:
    """Walks over a result; `at` is where it is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def number(self) -> int:
        """A number of seven bits a byte, the lowest first."""
        value = shift = 0
        while True:
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def text(self) -> str:
        """A text behind its length."""
        length = self.number()
        self.at += length
        return self._data[self.at - length : self.at].decode()

    def _uint64(self) -> int:
        self.at += 8
        return int(struct.unpack_from("<Q", self._data, self.at - 8)[0])

    def skip_prefix(self, type_name: str) -> None:
        """What a column has before its values: the version of each LowCardinality in it."""
        kind, inner = _split(type_name)
        if kind == "LowCardinality":
            self.at += 8
        elif kind in ("Array", "Map", "Tuple"):
            for part in inner:
                self.skip_prefix(part)
        elif kind == "SimpleAggregateFunction":
            self.skip_prefix(inner[1])

    def skip(self, type_name: str, num_rows: int) -> None:
        """Values of one type."""
        kind, inner = _split(type_name)
        if kind == "String":
            for _ in range(num_rows):
                length = self.number()
                self.at += length
        elif kind == "Nullable":
            self.at += num_rows
            self.skip(inner[0], num_rows)
        elif kind in ("Array", "Map"):
            self.at += 8 * (num_rows - 1)
            num_values = self._uint64()  # offsets are running totals
            for part in inner:
                self.skip(part, num_values)
        elif kind == "Tuple":
            for part in inner:
                self.skip(part, num_rows)
        elif kind == "SimpleAggregateFunction":
            self.skip(inner[1], num_rows)
        elif kind == "LowCardinality":
            self._skip_low_cardinality(inner[0], num_rows)
        else:
            self.at += num_rows * _width(kind, inner)

    def _skip_low_cardinality(self, type_name: str, num_rows: int) -> None:
        if not num_rows:
            return
        kind, inner = _split(type_name)
        flags = self._uint64()
        self.skip(inner[0] if kind == "Nullable" else type_name, self._uint64())
        num_keys = self._uint64()
        self.at += num_keys << (flags & _KEY_WIDTH)


def _width(kind: str, inner: list[str]) -> int:
    if kind == "FixedString":
        return int(inner[0])
    if kind == "Decimal":
        return next(width for digits, width in _DECIMAL_WIDTHS if int(inner[0]) <= digits)
    if kind.startswith("Interval"):
        return 8
    if kind not in _WIDTHS:
        raise _UnknownTypeError(f"type {kind}")
    return _WIDTHS[kind]


def _split(type_name: str) -> tuple[str, list[str]]:
    """A type's name, and what is in its parentheses; names of a tuple's fields are left out."""
    kind, _, rest = type_name.partition("(")
    if not rest or kind.startswith(("Enum", "DateTime")):
        return kind, []
    parts, depth, start, quote = [], 0, 0, ""
    for index, mark in enumerate(rest):
        if quote:
            quote = "" if mark == quote and rest[index - 1] != "\\" else quote
        elif mark in "'`":
            quote = mark
        elif mark == "(":
            depth += 1
        elif mark == ")" and depth:
            depth -= 1
        elif mark in ",)" and not depth:
            parts.append(rest[start:index].strip())
            start = index + 1
    if kind == "Tuple":
        parts = [_FIELD_NAME.sub("", part, count=1) if _FIELD_NAME.match(part) else part for part in parts]
    return kind, parts
