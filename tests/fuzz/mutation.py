"""Damage to valid inputs: bytes, and values inside JSON documents. Functions of their random source only."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

INTERESTING_BYTES = (0x00, 0x01, 0x0A, 0x22, 0x27, 0x2F, 0x5C, 0x7F, 0x80, 0xFE, 0xFF)
INTERESTING_INTEGERS = (
    0, 1, -1, 2, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32,
    2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 10**18,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "\x00", "\u202e", "\ud7ff\U0001f600", "9" * 5_000, "../../x", "'; DROP",
    [], {}, [[]], [{}], {"": {}}, 0.0, -0.0, 1e308, -1e308, 5e-324, 1.5,
    *INTERESTING_INTEGERS, 10**40, float("inf"), float("nan"),
)  # fmt: skip
WORDS = (
    b"SELECT", b"FROM", b"file(", b"url(", b"INTO OUTFILE", b"FORMAT", b"SETTINGS", b"UNION", b"--", b"/*",
    b"*/", b"'", b'"', b"`", b"\\", b"$$", b"#", b";", b"\xe2\x80\x98", b"{a:Identifier}", b"null", b"NaN",
    b"Infinity", b"1e999", b"[" * 40, b'{"a":' * 40, b"%00", b"%", b"&", b"=", b"+", b"\r\n", b"\x1f\x8b",
)  # fmt: skip


def mutate(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One to a few changes of some bytes."""
    changed = bytearray(data)
    for _ in range(1 + min(int(rng.expovariate(0.7)), 12)):
        _change(changed, rng, seeds)
    return bytes(changed)


def _change(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    kind = rng.randrange(10)
    at = rng.randrange(len(data) + 1)
    length = min(len(data) - at, 1 + int(rng.expovariate(0.15)))
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = rng.choice(INTERESTING_BYTES)
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        data[at:at] = data[at : at + length]
    elif kind == 4:
        data[at:at] = rng.randbytes(1 + rng.randrange(8))
    elif kind == 5:
        del data[at:]
    elif kind == 6:
        other = rng.choice(seeds)
        start = rng.randrange(len(other) + 1)
        data[at : at + length] = other[start : start + 1 + int(rng.expovariate(0.02))]
    elif kind == 7:
        width = rng.choice((2, 4, 8))
        value = rng.choice(INTERESTING_INTEGERS) & (2 ** (8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
    elif kind == 8:
        data[at:at] = rng.choice(WORDS)
    else:
        digits = [index for index, byte in enumerate(data[:4_096]) if 0x30 <= byte <= 0x39]
        if digits:
            place = rng.choice(digits)
            data[place : place + 1] = str(rng.choice(INTERESTING_INTEGERS)).encode()


def mutate_document(document: Any, rng: random.Random) -> bytes:
    """A JSON document with some of its values replaced, doubled or taken away, as text."""
    changed = json.loads(json.dumps(document))
    for _ in range(1 + min(int(rng.expovariate(0.7)), 8)):
        changed = _change_node(changed, rng)
    return json.dumps(changed).encode()


def _change_node(document: Any, rng: random.Random) -> Any:
    holder, key = _some_place(document, rng)
    if holder is None:
        return _odd_value(rng)
    kind = rng.randrange(6)
    if kind <= 2:
        holder[key] = _odd_value(rng)
    elif kind == 3:
        del holder[key]
    elif kind == 4 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), holder[key])
    elif kind == 4:
        holder[f"{key}{rng.choice(('', ' ', 's', '_'))}"] = holder.pop(key)
    else:
        value: Any = holder[key]
        for _ in range(rng.choice((1, 2, 50, 300))):
            value = [value] if rng.random() < 0.5 else {"value": value}
        holder[key] = value
    return document


def _odd_value(rng: random.Random) -> Any:
    # One of its own: what is changed later would be in every document to come, and could hold itself.
    return copy.deepcopy(rng.choice(ODD_VALUES))


def _some_place(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container inside the document and a key of it, found by walking down at random."""
    holder, key = None, None
    node = document
    while isinstance(node, (dict, list)) and node:
        holder = node
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = node[key]
        if rng.random() < 0.12:
            break
    return holder, key
