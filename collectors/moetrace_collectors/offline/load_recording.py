"""Expert loads as read from a dump: counts by step, layer and expert, and what was left out of them.

`LoadRecording` is what every reader of loads returns; `CountBuilder` gathers counts that come row by row.
Pure, no I/O.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import IntArray
from moetrace_collectors.offline.source import bad_file
from moetrace_schemas.enums import ForwardMode

MAX_EXPERTS = 65_536
MAX_LAYERS = 4_096
MAX_CELLS = 1 << 28
"""Steps x layers x experts that are held in memory (2 GiB of counts)."""
MAX_COUNT = 1 << 53
"""Largest count of one cell: what every JSON writer can still write exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecording:
    """Routed (token, slot) pairs per logical expert, by step and MoE layer.

    Warm-up, dummy and padding rows are in `left_out` and in no count.
    """

    source: str
    """File, and the name within it where it holds several recordings."""
    format: str
    """Which reader read it."""
    steps: IntArray
    """[S], ascending; a step that holds prefill and decode is two entries, one per forward mode."""
    forward_modes: tuple[ForwardMode | None, ...]
    """[S]; None where the dump does not say."""
    layers: IntArray
    """[L], ascending, as the model numbers its blocks."""
    layer_names: tuple[str, ...]
    """[L], for people: "3", or "mtp 0.1" for a layer of a multi-token prediction block."""
    counts: IntArray
    """[S, L, E]"""
    top_k: int | None
    """Experts per token; None where the dump does not say."""
    model_name: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Pairs that are in no count, by reason: warmup, dummy, padding, invalid."""
    warnings: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int:
        """Logical experts per layer."""
        return int(self.counts.shape[2])

    @property
    def totals(self) -> IntArray:
        """[L, E]: counts summed over steps."""
        summed: IntArray = self.counts.sum(axis=0, dtype=np.int64)
        return summed


StepKey = tuple[int, ForwardMode | None]
LayerKey = tuple[int, int, int]
"""(0, 0, layer) of the decoder; (1, block, layer) of a multi-token prediction block, which sorts after it."""


def decoder_layer(layer: int) -> LayerKey:
    """Key of an ordinary layer."""
    return (0, 0, layer)


class CountBuilder:
    """Gathers expert ids or counts row by row and turns them into a recording."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[tuple[StepKey, LayerKey], array[int]] = {}
        self._counts: dict[tuple[StepKey, LayerKey], Counter[int]] = {}
        self.left_out: Counter[str] = Counter()

    def add_ids(self, step: StepKey, layer: LayerKey, expert_ids: Sequence[int]) -> None:
        """Routes of one or more tokens: one pair per id."""
        known = self._ids.get((step, layer))
        if known is None:
            known = self._ids[(step, layer)] = array("q")
        known.extend(expert_ids)

    def add_count(self, step: StepKey, layer: LayerKey, expert: int, count: int) -> None:
        """So many pairs of one expert."""
        self._counts.setdefault((step, layer), Counter())[expert] += count

    def leave_out_all(self, reason: str) -> None:
        """Move every pair gathered so far from the counts to what is left out."""
        self.left_out[reason] += sum(len(ids) for ids in self._ids.values())
        self.left_out[reason] += sum(sum(counter.values()) for counter in self._counts.values())
        self._ids.clear()
        self._counts.clear()

    def take(self, other: CountBuilder) -> None:
        """Add all that another builder gathered; the other one is empty afterwards."""
        for (step, layer), ids in other._ids.items():
            self._ids.setdefault((step, layer), array("q")).extend(ids)
        for key, counter in other._counts.items():
            self._counts.setdefault(key, Counter()).update(counter)
        self.left_out.update(other.left_out)
        other._ids.clear()
        other._counts.clear()
        other.left_out.clear()

    def build(
        self,
        *,
        source: str,
        format: str,
        num_experts: int | None,
        top_k: int | None,
        model_name: str = "",
        warnings: Sequence[str] = (),
    ) -> LoadRecording:
        """The recording. Ids below zero are padding, ids of no expert are invalid.

        Raises:
            UsageError: nothing counted, or more steps, layers or experts than can be held.
        """
        keys = {*self._ids, *self._counts}
        if not keys:
            raise bad_file(self._path, "", "at least one row with expert ids or counts expected")
        said = list(warnings)
        if num_experts is None:
            num_experts = self._highest_expert() + 1
            said.append(
                f"{source}: the number of experts is not told; {num_experts} taken (highest id plus one), "
                "so experts that no token reached may be missing"
            )
        steps = sorted({step for step, _ in keys}, key=lambda key: (key[0], str(key[1] or "")))
        layers = sorted({layer for _, layer in keys})
        check_size(self._path, steps=len(steps), layers=len(layers), experts=num_experts)
        counts = np.zeros((len(steps), len(layers), num_experts), dtype=np.int64)
        step_index = {key: index for index, key in enumerate(steps)}
        layer_index = {key: index for index, key in enumerate(layers)}
        left_out = Counter(self.left_out)
        for (step, layer), ids in self._ids.items():
            values = np.frombuffer(ids, dtype=np.int64) if len(ids) else np.zeros(0, dtype=np.int64)
            padding, invalid = values < 0, values >= num_experts
            left_out["padding"] += int(padding.sum())
            left_out["invalid"] += int(invalid.sum())
            cell = counts[step_index[step], layer_index[layer]]
            cell += np.bincount(values[~(padding | invalid)], minlength=num_experts)
        for (step, layer), counter in self._counts.items():
            for expert, count in counter.items():
                if 0 <= expert < num_experts:
                    counts[step_index[step], layer_index[layer], expert] += count
                else:
                    left_out["padding" if expert < 0 else "invalid"] += count
        last_decoder = max((key[2] for key in layers if key[0] == 0), default=-1)
        numbers = [
            key[2] if key[0] == 0 else last_decoder + 1 + index
            for index, key in zip(_ordinals(layers), layers, strict=True)
        ]
        return LoadRecording(
            source=source,
            format=format,
            steps=np.array([step for step, _ in steps], dtype=np.int64),
            forward_modes=tuple(mode for _, mode in steps),
            layers=np.array(numbers, dtype=np.int64),
            layer_names=tuple(str(key[2]) if key[0] == 0 else f"mtp {key[1]}.{key[2]}" for key in layers),
            counts=counts,
            top_k=top_k,
            model_name=model_name,
            left_out={reason: count for reason, count in sorted(left_out.items()) if count},
            warnings=tuple(said),
        )

    def _highest_expert(self) -> int:
        highest = max((max(ids) for ids in self._ids.values() if len(ids)), default=-1)
        counted = max((max(counter) for counter in self._counts.values() if counter), default=-1)
        if max(highest, counted) < 0:
            raise bad_file(self._path, "", "at least one expert id of 0 or more expected")
        return max(highest, counted)


def _ordinals(layers: Sequence[LayerKey]) -> list[int]:
    """Index of each key among keys of its kind (decoder or not)."""
    seen: Counter[int] = Counter()
    ordinals = []
    for key in layers:
        ordinals.append(seen[key[0]])
        seen[key[0]] += 1
    return ordinals


def check_size(path: Path, *, steps: int, layers: int, experts: int) -> None:
    """Refuse a recording that would not fit, before memory is asked for.

    Raises:
        UsageError: too many steps, layers or experts.
    """
    if experts > MAX_EXPERTS:
        raise bad_file(path, "", f"at most {MAX_EXPERTS} experts expected, got {experts}")
    if layers > MAX_LAYERS:
        raise bad_file(path, "", f"at most {MAX_LAYERS} layers expected, got {layers}")
    if steps * layers * experts > MAX_CELLS:
        raise bad_file(
            path,
            "",
            f"at most {MAX_CELLS} cells expected, got {steps} steps x {layers} layers x {experts} experts",
        )


def merge(recordings: Sequence[LoadRecording]) -> LoadRecording:
    """Recordings of several ranks of one model as one: counts of equal step, mode and layer are summed.

    Raises:
        UsageError: the ranks disagree on the number of experts.
    """
    first = recordings[0]
    if len(recordings) == 1:
        return first
    for other in recordings[1:]:
        if other.num_experts != first.num_experts:
            raise UsageError(
                f"{other.source}: {first.num_experts} experts expected as in {first.source}, "
                f"got {other.num_experts}"
            )
    steps = sorted(
        {key for r in recordings for key in _step_keys(r)}, key=lambda key: (key[0], str(key[1] or ""))
    )
    names = {
        int(n): name for r in recordings for n, name in zip(r.layers.tolist(), r.layer_names, strict=True)
    }
    layers = sorted(names)
    check_size(Path(first.source), steps=len(steps), layers=len(layers), experts=first.num_experts)
    counts = np.zeros((len(steps), len(layers), first.num_experts), dtype=np.int64)
    left_out: Counter[str] = Counter()
    for recording in recordings:
        at = np.ix_(
            [steps.index(key) for key in _step_keys(recording)],
            [layers.index(layer) for layer in recording.layers.tolist()],
        )
        counts[at] += recording.counts
        left_out.update(recording.left_out)
    top_ks = {recording.top_k for recording in recordings}
    return LoadRecording(
        source=", ".join(recording.source for recording in recordings),
        format=first.format,
        steps=np.array([step for step, _ in steps], dtype=np.int64),
        forward_modes=tuple(mode for _, mode in steps),
        layers=np.array(layers, dtype=np.int64),
        layer_names=tuple(names[layer] for layer in layers),
        counts=counts,
        top_k=top_ks.pop() if len(top_ks) == 1 else None,
        model_name=first.model_name,
        left_out=dict(left_out),
        warnings=tuple(dict.fromkeys(w for recording in recordings for w in recording.warnings)),
    )


def _step_keys(recording: LoadRecording) -> list[StepKey]:
    return list(zip(recording.steps.tolist(), recording.forward_modes, strict=True))
