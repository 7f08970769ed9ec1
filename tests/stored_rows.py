"""Rank steps of every shape, stored as a collector does: `python -m stored_rows client|embedded STORE_PATH`.

Prints the rows, and the code of the error that an insert into no table ends with.

`expected` renders the same steps value by value, without arrays, and knows nothing of the sink's code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetrace_collectors.decode import decode
from moetrace_collectors.model import CoactivationColumns, ExpertCounts, PhaseColumns, RankStep, TrafficRow
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import (
    COACTIVATION_SPAN_BY_CODE,
    COUNT_KIND_BY_CODE,
    DIRECTION_BY_CODE,
    PHASE_BY_CODE,
    CountKind,
    ForwardMode,
)

NUM_HOSTS = 150
"""More texts in one column than a byte numbers."""
NUM_EXPERTS = 16
SELECTED = {
    "phase_spans": (
        "run_id, step, layer, phase, direction, microbatch, ordinal, rank, is_barrier, ep_group, ep_rank, "
        "forward_mode, cohort, stream, flags, toUnixTimestamp64Nano(start_time), duration_ns, bytes, rows, "
        "record_microbatch, position"
    ),
    "expert_loads": (
        "run_id, step, layer, count_kind, forward_mode, cohort, rank, microbatch, expert, count, "
        "placement_version, toUnixTimestamp64Milli(step_time)"
    ),
    "rank_traffic": (
        "run_id, step, layer, phase, forward_mode, source_rank, destination_ep_rank, microbatch, rows, "
        "bytes, source_host, toUnixTimestamp64Milli(step_time), direction"
    ),
    "expert_coactivation": (
        "run_id, step, layer, span, forward_mode, cohort, rank, microbatch, first, second, tokens, "
        "toUnixTimestamp64Milli(step_time)"
    ),
}
Row = tuple[str, ...]


def rank_steps() -> list[RankStep]:
    """One rank step per host, of changing modes, microbatches, cohorts and shapes."""
    random = np.random.default_rng(5)
    modes = list(ForwardMode)
    template = SyntheticRun(num_layers=1).step(0)[0]
    steps = []
    for number in range(NUM_HOSTS):
        steps.append(
            replace(
                template,
                run_id=f"run-{number % 3}",
                step=number // 6 if number else 2**40,
                rank=number,
                microbatch=number % 2,
                world_size=NUM_HOSTS,
                ep_rank=number % 5,
                ep_size=5,
                ep_group=number - number % 5,
                forward_mode=modes[number % len(modes)],
                cohort=("", "canary", "a b")[number % 3],
                host_name=f"host-{number}",
                placement_version=number % 4,
                start_unix_ns=template.start_unix_ns + number * 86_399_999_999_999 // 50,
                phases=_phases(random, 0 if number == 7 else 40),
                experts=() if number % 7 == 3 else _experts(random),
                traffic=() if number % 7 == 4 else _traffic(random),
                coactivation=_pairs() if number % 4 == 1 else None,
            )
        )
    return steps


def _phases(random: np.random.Generator, num_rows: int) -> PhaseColumns:
    ordinals = np.arange(num_rows)  # keeps every identity its own
    return PhaseColumns(
        layer=random.integers(-1, 60, num_rows),
        phase=random.integers(0, len(PHASE_BY_CODE), num_rows),
        direction=random.integers(0, 2, num_rows),
        microbatch=random.integers(1, 4, num_rows),
        ordinal=ordinals,
        stream=random.integers(0, 300, num_rows),
        flags=random.integers(0, 2, num_rows) * int(RowFlag.BARRIER),
        # Some start together, and the first before the step by its own clock.
        start_offset_ns=np.sort(random.integers(-3, 12, num_rows)) * 1_000_003,
        duration_ns=random.integers(0, 2**40, num_rows),
        bytes=random.integers(-1, 2**45, num_rows),
        rows=random.integers(-1, 2**30, num_rows),
    )


def _experts(random: np.random.Generator) -> tuple[ExpertCounts, ...]:
    entries = []
    for layer in (0, 3):
        for code, kind in COUNT_KIND_BY_CODE.items():
            size = 1 if kind in (CountKind.INVALID, CountKind.DUMMY) else NUM_EXPERTS
            counts = random.integers(0, 3, size) * random.integers(0, 2**33, size)
            if kind is CountKind.RECEIVED and layer:
                counts = np.zeros(size, dtype=np.int64)
            entries.append(ExpertCounts(layer=layer, kind=code, counts=counts))
    return tuple(entries)


def _traffic(random: np.random.Generator) -> tuple[TrafficRow, ...]:
    exchanges = [code for code, phase in PHASE_BY_CODE.items() if phase.value in ("dispatch", "combine")]
    return tuple(
        TrafficRow(layer=layer, phase=code, row_bytes=14_336 + code, rows=random.integers(0, 9_000, 5))
        for layer in (0, 3)
        for code in exchanges
    )


def _pairs() -> CoactivationColumns:
    rows = np.array([(0, 0, 0, 1, 10), (0, 0, 1, 9, 5), (0, 1, 9, 2, 2**31), (3, 0, 4, 65_535, 1)]).T
    return CoactivationColumns(**dict(zip(("layer", "span", "first", "second", "count"), rows, strict=True)))


def expected(table: str) -> list[Row]:
    """The rows of a table, sorted as texts."""
    render = {
        "phase_spans": _phase_rows,
        "expert_loads": _load_rows,
        "rank_traffic": _traffic_rows,
        "expert_coactivation": _pair_rows,
    }[table]
    return sorted(tuple(map(str, row)) for step in rank_steps() for row in render(step))


def _phase_rows(step: RankStep) -> Iterator[tuple[object, ...]]:
    phases = step.phases
    for i in range(len(phases)):
        flags = int(phases.flags[i])
        yield (
            step.run_id, step.step, int(phases.layer[i]), PHASE_BY_CODE[int(phases.phase[i])].value,
            DIRECTION_BY_CODE[int(phases.direction[i])].value, int(phases.microbatch[i]),
            int(phases.ordinal[i]), step.rank, 1 if flags & RowFlag.BARRIER else 0, step.ep_group,
            step.ep_rank,
            step.forward_mode.value, step.cohort, int(phases.stream[i]), flags,
            step.start_unix_ns + int(phases.start_offset_ns[i]), int(phases.duration_ns[i]),
            int(phases.bytes[i]), int(phases.rows[i]), step.microbatch, i,
        )  # fmt: skip


def _load_rows(step: RankStep) -> Iterator[tuple[object, ...]]:
    for entry in step.experts:
        kind = COUNT_KIND_BY_CODE[entry.kind]
        for expert, count in enumerate(entry.counts.tolist()):
            is_last = expert == len(entry.counts) - 1
            if count or kind is CountKind.ROUTED or (kind is CountKind.RECEIVED and is_last):
                yield (
                    step.run_id, step.step, entry.layer, kind.value, step.forward_mode.value, step.cohort,
                    step.rank, step.microbatch, expert, count, step.placement_version,
                    step.start_unix_ns // 1_000_000,
                )  # fmt: skip


def _traffic_rows(step: RankStep) -> Iterator[tuple[object, ...]]:
    for entry in step.traffic:
        for destination, sent in enumerate(entry.rows.tolist()):
            yield (
                step.run_id, step.step, entry.layer, PHASE_BY_CODE[entry.phase].value,
                step.forward_mode.value, step.rank, destination, step.microbatch, sent,
                sent * entry.row_bytes, step.host_name, step.start_unix_ns // 1_000_000, "forward",
            )  # fmt: skip


def _pair_rows(step: RankStep) -> Iterator[tuple[object, ...]]:
    pairs = step.coactivation
    for i in range(0 if pairs is None else len(pairs)):
        assert pairs is not None
        yield (
            step.run_id, step.step, int(pairs.layer[i]), COACTIVATION_SPAN_BY_CODE[int(pairs.span[i])].value,
            step.forward_mode.value, step.cohort, step.rank, step.microbatch, int(pairs.first[i]),
            int(pairs.second[i]), int(pairs.count[i]), step.start_unix_ns // 1_000_000,
        )  # fmt: skip


def main(way: str, path: str) -> None:
    """Store the steps as they come off the wire, and print what a reader finds.

    Args:
        way: `client` inserts through clickhouse-connect, `embedded` from this process's memory.
        path: of the store.
    """
    import pyarrow as pa
    from clickhouse_connect.driver.exceptions import DatabaseError

    from moetrace_collectors.migrate import migrate
    from moetrace_collectors.sinks.clickhouse import ClickHouseSink
    from moetrace_collectors.sinks.embedded_insert import EMBEDDED_SETTINGS, EmbeddedInsert
    from moetrace_collectors.store import embedded_dsn, open_client, parse_store

    client = open_client(parse_store(embedded_dsn(Path(path))))
    migrate(client, database="moetrace")
    lost: list[str] = []
    embedded = EmbeddedInsert(Path(path), database="moetrace", settings=EMBEDDED_SETTINGS)
    sink = ClickHouseSink(
        client,
        database="moetrace",
        batch_bytes=2**30,
        on_stored=lambda table, rows: None,
        on_lost=lambda table, rows: lost.append(table),
        insert_arrow=embedded if way == "embedded" else None,
    )
    decoded = decode(request(rank_steps()), max_world_size=1_000)
    assert not decoded.rejected, decoded.rejected[0].detail
    for rank_step in decoded.rank_steps:
        sink.take_unjoined(rank_step)
    sink.flush()
    assert not lost
    stored = {
        table: client.query(f"SELECT {columns} FROM moetrace.{table} FINAL").result_rows
        for table, columns in SELECTED.items()
    }
    code = None
    try:
        embedded("no_such_table", pa.table({"step": [1]}))
    except DatabaseError as error:
        code = error.code
    rows = {table: [[str(v) for v in row] for row in rows] for table, rows in stored.items()}
    print(json.dumps({"rows": rows, "error_code": code}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
