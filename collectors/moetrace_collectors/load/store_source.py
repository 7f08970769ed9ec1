"""Loads of a run from a store. The only place of this package that turns rows into series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load import store_queries as queries
from moetrace_collectors.load.communication import Communication
from moetrace_collectors.load.series import MAX_CELLS, GemmSamples, LoadSeries, in_order
from moetrace_collectors.load.store_coactivation import read_sampled_pairs
from moetrace_collectors.load.store_epochs import RunEpoch, read_epoch
from moetrace_collectors.load.store_placement import LedgerEntry, placement_of, read_entry
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.views.store_rows import Row, Store
from moetrace_schemas.enums import ForwardMode

MAX_GEMM_SAMPLES = 20_000
"""(step, layer, rank) drawn to fit the experts' time; a line needs no more."""
ALL_COHORTS = "*"

Values = Mapping[str, int | str | list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """Where ranks sit: (ep_group, ep_rank) by global rank, and what follows from it."""

    place: Mapping[int, int]
    """Global rank -> ep_rank."""
    size: int | None
    """Ranks per group; None where groups differ."""
    groups: int
    nodes: int | None
    """Nodes per group; None where hosts do not split a group into equal runs of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Source:
    """What all series of a run share."""

    store: Store
    run_id: str
    epoch: RunEpoch
    entry: LedgerEntry
    ranks: _Ranks


def read_series(store: Store, run_id: str, *, epoch: int | None = None) -> tuple[LoadSeries, ...]:
    """Per forward mode: all cohorts together, then each cohort where there is more than one.

    Args:
        store: where the run is.
        run_id: the run.
        epoch: placement version whose steps are read; None: the newest one with counts.

    Raises:
        UsageError: the run has no expert counts or no such epoch, or the store does not answer.
    """
    chosen = read_epoch(store, run_id, epoch)
    source = _Source(
        store=store,
        run_id=run_id,
        epoch=chosen,
        entry=read_entry(store, run_id, chosen.version),
        ranks=_ranks(store.rows(queries.RANKS, {"run": run_id})),
    )
    found = []
    for mode in sorted({str(view["forward_mode"]) for view in chosen.views}):
        of_mode = [view for view in chosen.views if view["forward_mode"] == mode]
        found.append(_series(source, _known_mode(mode), None, of_mode))
        if len(of_mode) > 1:
            found += [
                _series(source, _known_mode(mode), str(view["cohort"]), [view])
                for view in sorted(of_mode, key=lambda view: str(view["cohort"]))
            ]
    return in_order(found, source=f"run {run_id}")


def _series(source: _Source, mode: ForwardMode, cohort: str | None, views: Sequence[Row]) -> LoadSeries:
    store, ranks = source.store, source.ranks
    layers = np.array(sorted({int(layer) for view in views for layer in view["layers"]}), dtype=np.int64)
    experts = max(int(view["experts"]) for view in views)
    first = min(int(view["first_step"]) for view in views)
    last = max(int(view["last_step"]) for view in views)
    most = max(1, MAX_CELLS // (len(layers) * experts))
    values: dict[str, int | str | list[int]] = {
        "run": source.run_id,
        **source.epoch.values,
        "mode": mode.value,
        "cohort": ALL_COHORTS if cohort is None else cohort,
        "first": first,
        "width": -(-(last - first + 1) // most),
    }
    entries = store.rows(queries.ENTRIES, values)
    index = {int(entry["entry"]): at for at, entry in enumerate(entries)}
    width = int(str(values["width"]))
    warnings = list(source.epoch.warnings)
    if width > 1:
        warnings.append(f"steps are summed {width} at a time; step figures are of entries")
    if ranks.size is None:
        warnings.append(
            "ranks are in groups of different sizes: give --ranks and --placement for rank figures"
        )
    shape = (len(entries), len(layers))
    loads = _cells(store.rows(queries.LOADS, values), index, layers, (*shape, experts), None)
    return LoadSeries(
        source=f"run {source.run_id}",
        forward_mode=mode,
        cohort=cohort,
        steps=np.array([int(entry["first_step"]) for entry in entries], dtype=np.int64),
        steps_in_entry=np.array([int(entry["steps"]) for entry in entries], dtype=np.int64),
        layers=layers,
        layer_names=tuple(str(layer) for layer in layers.tolist()),
        loads=loads,
        start_s=np.array([int(entry["start_ms"]) for entry in entries]) / 1e3,
        num_ranks=ranks.size,
        num_groups=ranks.groups,
        num_nodes=ranks.nodes,
        received=_received(store, values, index, layers, shape, ranks),
        # Exchanges carry no cohort: only the whole of a forward mode has them.
        communication=None if cohort is not None else _communication(store, values, layers, ranks),
        received_remote=None if cohort is not None else _remote(store, values, index, layers, shape, ranks),
        source_counts=_sources(store, values, layers, experts, ranks),
        gemm=_gemm(store.rows(queries.GEMM, {**values, "limit": MAX_GEMM_SAMPLES})),
        step_ms=_step_ms(store.rows(queries.STEP_TIME, values)),
        coactivation=read_sampled_pairs(store, values, layers, experts, warnings),
        placement_version=source.epoch.version,
        placement=placement_of(
            source.entry, layers, num_experts=experts, num_ranks=ranks.size, warnings=warnings
        ),
        expert_bytes=source.entry.expert_bytes,
        last_step=last,
        warmup_told=True,
        warnings=tuple(warnings),
    )


def _cells(
    rows: Sequence[Row],
    index: Mapping[int, int],
    layers: IntArray,
    shape: tuple[int, ...],
    place: Mapping[int, int] | None,
) -> FloatArray:
    """[S, L, n] from rows of (entry, layer, columns, totals); `place` renames columns and adds equal ones."""
    cells = np.zeros(shape)
    at_layer = {layer: at for at, layer in enumerate(layers.tolist())}
    for row in rows:
        if int(row["entry"]) not in index or int(row["layer"]) not in at_layer:
            continue  # counted only on the other side
        columns = [int(column) for column in row["columns"]]
        totals = np.array([float(total) for total in row["totals"]])
        if place is not None:
            known = [column in place for column in columns]
            totals = totals[known]
            columns = [place[column] for column in columns if column in place]
        np.add.at(cells[index[int(row["entry"])], at_layer[int(row["layer"])]], columns, totals)
    return cells


def _received(
    store: Store,
    values: Values,
    index: Mapping[int, int],
    layers: IntArray,
    shape: tuple[int, int],
    ranks: _Ranks,
) -> FloatArray | None:
    if ranks.size is None:
        return None
    rows = store.rows(queries.RECEIVED, values)
    return _cells(rows, index, layers, (*shape, ranks.size), ranks.place) if rows else None


def _remote(
    store: Store,
    values: Values,
    index: Mapping[int, int],
    layers: IntArray,
    shape: tuple[int, int],
    ranks: _Ranks,
) -> FloatArray | None:
    if ranks.size is None:
        return None
    places = {"ranks": list(ranks.place), "places": list(ranks.place.values())}
    rows = store.rows(queries.REMOTE, {**values, **places})
    same = {place: place for place in range(ranks.size)}
    return _cells(rows, index, layers, (*shape, ranks.size), same) if rows else None


def _communication(store: Store, values: Values, layers: IntArray, ranks: _Ranks) -> Communication | None:
    if ranks.size is None:
        return None
    sent = store.rows(queries.TRAFFIC, values)
    at_layer = {layer: at for at, layer in enumerate(layers.tolist())}
    rows = np.zeros((len(layers), ranks.size, ranks.size))
    sizes = np.zeros_like(rows)
    for row in sent:
        source = ranks.place.get(int(row["source_rank"]))
        destination = int(row["destination_ep_rank"])
        if source is None or destination >= ranks.size or int(row["layer"]) not in at_layer:
            continue
        place = (at_layer[int(row["layer"])], source, destination)
        rows[place] += float(row["total_rows"])
        sizes[place] += float(row["total_bytes"])
    if not rows.any():
        return None
    return Communication(rows=rows, bytes=sizes if sizes.any() else None, measured=True)


def _sources(
    store: Store, values: Values, layers: IntArray, experts: int, ranks: _Ranks
) -> FloatArray | None:
    if ranks.size is None:
        return None
    counts = np.zeros((len(layers), ranks.size, experts))
    at_layer = {layer: at for at, layer in enumerate(layers.tolist())}
    for row in store.rows(queries.SOURCES, values):
        source = ranks.place.get(int(row["rank"]))
        if source is not None:
            totals = np.array([float(total) for total in row["totals"]])
            cell = counts[at_layer[int(row["layer"])], source]
            np.add.at(cell, [int(column) for column in row["columns"]], totals)
    return counts


def _ranks(rows: Sequence[Row]) -> _Ranks:
    place = {int(row["rank"]): int(row["ep_rank"]) for row in rows}
    hosts: dict[int, dict[int, str]] = {}
    for row in rows:
        hosts.setdefault(int(row["ep_group"]), {})[int(row["ep_rank"])] = str(row["host"])
    sizes = {int(row["ep_size"]) for row in rows}
    nodes = {_nodes(group) for group in hosts.values()}
    return _Ranks(
        place=place,
        size=sizes.pop() if len(sizes) == 1 else None,
        groups=max(len(hosts), 1),
        nodes=nodes.pop() if len(nodes) == 1 else None,
    )


def _nodes(host_by_place: Mapping[int, str]) -> int | None:
    """Hosts of a group, if each has a run of equally many ranks."""
    hosts = [host_by_place[place] for place in sorted(host_by_place)]
    count = len(set(hosts))
    if len(hosts) % count:
        return None
    run = len(hosts) // count
    in_runs = all(len(set(hosts[start : start + run])) == 1 for start in range(0, len(hosts), run))
    return count if in_runs else None


def _gemm(rows: Sequence[Row]) -> GemmSamples | None:
    if not rows:
        return None
    return GemmSamples(
        rows=np.array([float(row["rows"]) for row in rows]),
        microseconds=np.array([float(row["duration_ns"]) for row in rows]) / 1e3,
    )


def _step_ms(rows: Sequence[Row]) -> float | None:
    if not rows or not int(rows[0]["steps"]):
        return None
    return float(rows[0]["median_ns"]) / 1e6


def _known_mode(name: str) -> ForwardMode:
    try:
        return ForwardMode(name)
    except ValueError as error:
        raise UsageError(
            f"the store holds forward mode {name!r}, which this version does not know: upgrade moetrace"
        ) from error
