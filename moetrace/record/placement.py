"""A placement as users give it -> a checked map and its terms. Runs at a change, never per step.

Nothing here waits for a device: a tensor that is not in host memory is refused, and copying it
is the caller's to do (`.cpu()`), at a moment of their choice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetrace.errors import ConfigError
from moetrace_schemas.enums import CountIds
from moetrace_schemas.placement import EMPTY, PlacementError, PlacementMap, PlacementTerms, check_version


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """A placement that begins with a step."""

    version: int
    step: int
    map: PlacementMap
    terms: PlacementTerms
    start_unix_ns: int


def make_placement(
    version: int,
    given: object,
    *,
    step: int,
    layers: Sequence[int] | None,
    num_experts: int | None,
    ranks: int | None,
    terms: Mapping[str, Any],
    known_ranks: int,
    known_layers: Sequence[int],
) -> PlacementRecord | None:
    """What `Tracer.placement` was given as a record; None for a version without a map.

    Args:
        version: of the placement.
        given: the map, see `make_map`; None where there is none.
        step: the step that it begins with.
        layers: see `make_map`.
        num_experts: see `make_map`.
        ranks: expert-parallel ranks; default `known_ranks`.
        terms: see `make_terms`.
        known_ranks: of the model.
        known_layers: of the model.

    Raises:
        ConfigError: a version, map or term that cannot be.
    """
    try:
        check_version("version", version)
    except PlacementError as error:
        raise ConfigError(str(error)) from None
    if given is None:
        if terms or layers is not None or num_experts is not None or ranks is not None:
            raise ConfigError("placement: terms without a map; pass physical_to_logical")
        return None
    return PlacementRecord(
        version=version,
        step=step,
        map=make_map(
            given,
            layers=layers,
            num_experts=num_experts,
            ranks=known_ranks if ranks is None else ranks,
            known_layers=known_layers,
        ),
        terms=make_terms(terms),
        start_unix_ns=time.time_ns(),
    )


def make_terms(terms: Mapping[str, Any]) -> PlacementTerms:
    """Terms from keyword arguments.

    Raises:
        ConfigError: an unknown name, or a value that is not allowed.
    """
    known = PlacementTerms.__dataclass_fields__
    unknown = sorted(set(terms) - set(known))
    if unknown:
        raise ConfigError(f"placement {unknown[0]}=: no such term; one of {', '.join(known)} expected")
    values = {name: value for name, value in terms.items() if value is not None}
    try:
        if "count_ids" in values:
            values["count_ids"] = CountIds(values["count_ids"])
        if "window" in values:
            values["window"] = tuple(values["window"])
        return PlacementTerms(**values)
    except PlacementError as error:
        raise ConfigError(str(error)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"placement terms: {error}") from None


def make_map(
    given: object,
    *,
    layers: Sequence[int] | None,
    num_experts: int | None,
    ranks: int,
    known_layers: Sequence[int] = (),
) -> PlacementMap:
    """A map from what engines hand around.

    Args:
        given: `[layers][slots]` of logical experts (lists, or an array or tensor in host memory), one
            layer of it, or a dictionary layer -> slots; a layer's slots may also be a
            dictionary expert -> slot or slots.
        layers: numbers of the layers; default `known_layers` where there are as many, else 0, 1, ...
        num_experts: logical experts; default: the highest one given, and one more.
        ranks: expert-parallel ranks.
        known_layers: of the instrumented model.

    Raises:
        ConfigError: it is no map; the message names the place and what was expected.
    """
    if isinstance(given, Mapping):
        if layers is not None:
            raise ConfigError("placement layers=: the dictionary names its layers itself; leave it out")
        numbers = sorted(_whole(number, "layer") for number in given)
        rows = [_row(given[number], number) for number in numbers]
    else:
        rows = _rows(_listed(given))
        numbers = _numbers(len(rows), layers, known_layers)
    if num_experts is None:
        num_experts = 1 + max((expert for row in rows for expert in row), default=EMPTY)
    try:
        return PlacementMap(
            layers=tuple(numbers),
            physical_to_logical=tuple(rows),
            num_experts=num_experts,
            num_ranks=ranks,
        )
    except PlacementError as error:
        raise ConfigError(str(error)) from None


def _numbers(count: int, layers: Sequence[int] | None, known_layers: Sequence[int]) -> list[int]:
    if layers is not None:
        return [_whole(number, "layer") for number in layers]
    return list(known_layers) if len(known_layers) == count else list(range(count))


def _rows(table: object) -> list[tuple[int, ...]]:
    if not isinstance(table, list) or not table:
        raise ConfigError(
            "placement: [layers][slots] of logical experts expected (physical_to_logical), or a dictionary "
            f"layer -> slots, got {type(table).__name__}"
        )
    if not isinstance(_listed(table[0]), list | Mapping):
        table = [table]  # one layer
    return [_row(row, at) for at, row in enumerate(table)]


def _row(row: object, layer: int) -> tuple[int, ...]:
    if isinstance(row, Mapping):
        return _slots_of_experts(row, layer)
    listed = _listed(row)
    if not isinstance(listed, list):
        raise ConfigError(f"placement layer {layer}: a list of logical experts expected, got {listed!r}")
    return tuple(_whole(expert, f"layer {layer} slot {slot}") for slot, expert in enumerate(listed))


def _slots_of_experts(experts: Mapping[Any, Any], layer: int) -> tuple[int, ...]:
    """Expert -> slots turned round; SGLang pads its lists of slots with -1."""
    holder: dict[int, int] = {}
    for expert, told in experts.items():
        slots = _listed(told)
        for slot in slots if isinstance(slots, list) else [slots]:
            number = _whole(slot, f"layer {layer} expert {expert}")
            if number == EMPTY:
                continue
            if number < 0 or number in holder:
                raise ConfigError(
                    f"placement layer {layer} slot {number}: held by experts {holder.get(number)} and "
                    f"{expert}; every slot has one expert and a number of 0 or more"
                )
            holder[number] = _whole(expert, f"layer {layer} expert")
    return tuple(holder.get(slot, EMPTY) for slot in range(max(holder, default=EMPTY) + 1))


def _listed(value: object) -> object:
    """Lists out of arrays, tensors and tuples; anything else as it is."""
    device = getattr(value, "device", None)
    # numpy arrays say "cpu", torch tensors have a device object with a type.
    if device is not None and getattr(device, "type", device) != "cpu":
        raise ConfigError(
            f"placement: the map is on device {device}, reading it would wait for the device: pass map.cpu()"
        )
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _whole(value: object, place: str) -> int:
    if hasattr(value, "item"):
        value = value.item()
    if type(value) is not int:
        raise ConfigError(f"placement {place}: a whole number expected, got {value!r}")
    return value
