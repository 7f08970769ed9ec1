"""Placements as files: read what engines and planners write, write our own. I/O only.

JSON, one of::

    {"physical_to_logical": [[5, 6, 5, 7, ...], ...], "ranks": 8}   layers x slots: the expert in each
    {"expert_ranks": [[0, 0, 1, 1, ...], ...], "ranks": 8}          layers x experts: the rank of each
    [[5, 6, 5, 7, ...], ...]                                         layers x slots; ranks from --ranks
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.expert_map import EMPTY, Placement
from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.load_arrays import integers
from moetrace_collectors.offline.source import bad_file, read_json

SLOT_FIELDS = ("physical_to_logical", "physical_to_logical_map", "phy2log")
MAX_RANKS = 65_536
"""Ranks of a placement; memory grows with them whatever the file holds."""
RANK_FIELDS = ("expert_ranks", "logical_to_rank", "expert_to_rank")


def read_placement(path: Path, *, num_experts: int, num_ranks: int | None) -> Placement:
    """The placement in a file.

    Raises:
        UsageError: not a placement, ranks are not told, or a rank or expert is unknown.
    """
    document = read_json(path)
    told: object = None
    if isinstance(document, dict):
        told = document.get("ranks", document.get("num_ranks"))
        name = next((name for name in (*SLOT_FIELDS, *RANK_FIELDS) if name in document), None)
        if name is None:
            raise bad_file(path, "", f"one of {', '.join((*SLOT_FIELDS, *RANK_FIELDS))} expected")
        value: object = document[name]
    else:
        name, value = SLOT_FIELDS[0], document
    if told is not None and type(told) is not int:
        raise bad_file(path, "ranks", f"a whole number expected, got {told!r}")
    if told is not None and num_ranks is not None and told != num_ranks:
        raise UsageError(
            f"{path}: placement is of {told} ranks, --ranks says {num_ranks}: give --ranks {told}"
        )
    ranks = num_ranks or told
    if ranks is None:
        raise UsageError(f"{path}: the file does not tell its ranks: give --ranks")
    if not 1 <= ranks <= MAX_RANKS:
        raise bad_file(path, "ranks", f"1 to {MAX_RANKS} expected, got {ranks}")
    table = integers(value, path, name)
    if table.ndim == 1:
        table = table[np.newaxis]
    if table.ndim != 2 or 0 in table.shape:
        raise bad_file(path, name, f"[layers][slots] expected, got shape {list(table.shape)}")
    try:
        if name in RANK_FIELDS:
            table = _slots_of_ranks(table, int(ranks))
        return Placement(physical_to_logical=table, num_experts=num_experts, num_ranks=int(ranks))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def write_placement(path: Path, placement: Placement, *, layers: list[int]) -> None:
    """Write a placement that `read_placement` reads.

    Raises:
        UsageError: the file cannot be written.
    """
    document = {
        "ranks": placement.num_ranks,
        "experts": placement.num_experts,
        "layers": layers,
        "physical_to_logical": placement.physical_to_logical.tolist(),
    }
    write_json(path, document)


def write_json(path: Path, document: Any) -> None:
    """Write one JSON document, or say why not.

    Raises:
        UsageError: the file cannot be written.
    """
    write_text(path, json.dumps(document, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write one file, or say why not.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _slots_of_ranks(expert_ranks: IntArray, num_ranks: int) -> IntArray:
    """[L, E] ranks -> [L, S] experts; ranks with fewer experts get empty slots."""
    unknown = (expert_ranks < 0) | (expert_ranks >= num_ranks)
    if unknown.any():
        layer, expert = (int(index) for index in np.argwhere(unknown)[0])
        raise UsageError(
            f"layer {layer} puts expert {expert} on rank {int(expert_ranks[layer, expert])}: ranks are 0 to "
            f"{num_ranks - 1}; correct it, or give --ranks"
        )
    layers, experts = expert_ranks.shape
    held = [np.bincount(row, minlength=num_ranks).max() for row in expert_ranks]
    per_rank = int(max(held))
    slots = np.full((layers, num_ranks, per_rank), EMPTY, dtype=np.int64)
    for layer, row in enumerate(expert_ranks):
        filled = np.zeros(num_ranks, dtype=np.int64)
        for expert in range(experts):
            rank = int(row[expert])
            slots[layer, rank, filled[rank]] = expert
            filled[rank] += 1
    return slots.reshape(layers, -1)
