"""What a record becomes on the wire: names and types of the catalogue, and the same rows again."""

from __future__ import annotations

from array import array

from moetrace.emit.wire import HIGHEST_CYCLES, span_attributes
from moetrace.record.types import StepRecord, WaitRow
from moetrace_schemas import SCHEMA_VERSION, attributes
from moetrace_schemas.columns import EXPERTS, PHASES, TRAFFIC, WAITS, unpack
from moetrace_schemas.enums import COUNT_KIND_BY_CODE, DIRECTION_BY_CODE, PHASE_BY_CODE, Phase

from .records import CONTEXT, step_record

PYTHON_TYPES = {"string": str, "int": int, "bool": bool, "bytes": bytes}


def on_the_wire(record: StepRecord) -> dict[str, str | int | bool | bytes]:
    """A record's attributes."""
    return span_attributes(record, CONTEXT, sample_period=10, model_name="olmoe", model_version="r1")


def block(name: str) -> bytes:
    """A packed block of the small record."""
    value = on_the_wire(step_record())[name]
    assert isinstance(value, bytes)
    return value


def test_names_and_types_are_those_of_the_catalogue() -> None:
    """Exactly: a boolean is no integer and an enumeration no object of ours, whatever Python thinks."""
    values = on_the_wire(step_record())
    assert set(values) <= set(attributes.TYPES)
    assert {name: type(value) for name, value in values.items()} == {
        name: PYTHON_TYPES[attributes.TYPES[name]] for name in values
    }


def test_every_required_attribute_is_there_even_for_an_empty_step() -> None:
    """A step without rows, counts or traffic is still a step that the collector takes."""
    empty = on_the_wire(step_record(phases=(), experts=(), traffic=()))
    assert set(attributes.REQUIRED) <= set(empty)
    assert attributes.COLUMNS_EXPERTS not in empty
    assert attributes.COLUMNS_TRAFFIC not in empty


def test_values_are_those_of_the_record_and_its_rank() -> None:
    """Each attribute says what its name says."""
    values = on_the_wire(step_record(microbatch=4, warmup=True))
    columns = {attributes.COLUMNS_PHASES, attributes.COLUMNS_EXPERTS, attributes.COLUMNS_TRAFFIC}
    assert {name: value for name, value in values.items() if name not in columns} == {
        "moetrace.schema.version": SCHEMA_VERSION,
        "moetrace.run.id": "run-7",
        "moetrace.step.index": 5,
        "moetrace.rank": 3,
        "moetrace.world.size": 8,
        "moetrace.ep.rank": 1,
        "moetrace.ep.size": 4,
        "moetrace.ep.group": 2,
        "moetrace.microbatch.index": 4,
        "moetrace.forward.mode": "prefill",
        "moetrace.sample.period": 10,
        "moetrace.step.warmup": True,
        "moetrace.clock": "host",
        "moetrace.duration.ns": 100_000,
        "moetrace.model.name": "olmoe",
        "moetrace.model.version": "r1",
        "moetrace.cohort": "code",
        "moetrace.placement.version": 2,
    }


def test_phase_rows_unpack_to_the_same_rows() -> None:
    """Every column of every row comes back, closed sets by their codes."""
    record = step_record()
    columns, values = unpack(PHASES, block(attributes.COLUMNS_PHASES))
    assert not values
    for name, column in columns.items():
        decode = {"phase": PHASE_BY_CODE, "direction": DIRECTION_BY_CODE}.get(name)
        actual = [decode[code] for code in column] if decode else list(column)
        assert actual == [getattr(row, name) for row in record.phases], name


def test_expert_rows_unpack_to_the_same_counts() -> None:
    """Rows of different length lie behind each other."""
    columns, values = unpack(EXPERTS, block(attributes.COLUMNS_EXPERTS))
    assert list(columns["layer"]) == [0, 0]
    assert [COUNT_KIND_BY_CODE[code] for code in columns["count_kind"]] == ["routed", "invalid"]
    assert list(columns["length"]) == [3, 1]
    assert values == array("q", [3, 0, 4, 1])


def test_traffic_unpacks_to_the_same_rows() -> None:
    """Rows per destination, with the size of one."""
    columns, values = unpack(TRAFFIC, block(attributes.COLUMNS_TRAFFIC))
    assert {name: list(column) for name, column in columns.items()} == {
        "layer": [0],
        "phase": [3],
        "row_bytes": [16],
        "length": [4],
    }
    assert list(values) == [3, 4, 0, 0]


def test_waits_of_the_expert_parallel_group_unpack_and_others_are_left_out() -> None:
    """A buffer of another group has no place in the matrix; what a hung kernel summed stays in the limits."""
    size = CONTEXT.ep_size
    waits = (
        WaitRow(phase=Phase.DISPATCH, waits=(2**62,) * size),
        WaitRow(phase=Phase.COMBINE, waits=tuple(range(size))),
        WaitRow(phase=Phase.COMBINE, waits=(1,) * (size + 1)),
    )
    values = on_the_wire(step_record(waits=waits))
    packed = values[attributes.COLUMNS_WAITS]
    assert isinstance(packed, bytes)
    columns, cycles = unpack(WAITS, packed)
    assert [PHASE_BY_CODE[code] for code in columns["phase"]] == [Phase.DISPATCH, Phase.COMBINE]
    assert columns["length"].tolist() == [size, size]
    assert 0 < sum(cycles[:size]) <= HIGHEST_CYCLES
    assert cycles[size:].tolist() == list(range(size))
    other = on_the_wire(step_record(waits=waits[2:]))
    assert attributes.COLUMNS_WAITS not in other
