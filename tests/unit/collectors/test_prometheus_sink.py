"""Joined steps become exactly the catalogue's metrics, within their bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moetrace_collectors.intake import LedgerSnapshot
from moetrace_collectors.model import (
    BarrierResult,
    ExpertCounts,
    JoinedStep,
    LayerLoad,
    StepVerdict,
    Suspect,
    ViolationCount,
)
from moetrace_collectors.receipts import GroupViolation
from moetrace_collectors.self_metrics import SelfMetrics, WalMetrics, make_registry
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.exchange_overlap import exchange_time_ns
from moetrace_collectors.sinks.exchange_scope import rows_by_scope
from moetrace_collectors.sinks.group_series import bytes_by_group, members_of
from moetrace_collectors.sinks.placement_ledger import LedgerSink
from moetrace_collectors.sinks.prometheus import MAX_RUNS, PrometheusSink
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas import metrics
from moetrace_schemas.enums import (
    PHASE_CODE,
    Cause,
    ClosedBy,
    Direction,
    Evidence,
    ForwardMode,
    Phase,
    RejectReason,
    RoutingViolation,
)

RUN = SyntheticRun(run_id="r", world_size=2, num_layers=2, num_experts=4, num_pairs=8)
BARRIER = BarrierResult(
    ep_group=0,
    index=0,
    layer=1,
    phase=Phase.DISPATCH,
    direction=Direction.FORWARD,
    microbatch=0,
    ordinal=0,
    releaser_rank=1,
    work_phase=Phase.ROUTER,
    transfer_ns=500_000_000,
    max_work_ns=3,
    mean_work_ns=2,
    extension_ns=250_000_000,
    wait_sum_ns=125_000_000,
    ambiguous=False,
)


def result(step: int = 0, *, run_id: str = "r", warmup: bool = False, num_experts: int = 4) -> StepResult:
    """A joined step of two ranks whose verdict names rank 1."""
    run = replace(RUN, run_id=run_id, num_experts=num_experts)
    joined = JoinedStep(
        run_id=run_id,
        step=step,
        world_size=2,
        rank_steps=run.step(step),
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    verdict = StepVerdict(
        run_id=run_id,
        step=step,
        forward_mode=ForwardMode.TRAIN,
        evidence=Evidence.CLEAR,
        reason="because",
        suspect=Suspect(rank=1, phase=Phase.ROUTER, layer=1, worth_ns=250_000_000, share=1.0),
        cause=Cause.DEVICE,
        runner_up=None,
        step_ns=2_000_000_000,
        extension_ns=250_000_000,
        phase_ns={Phase.ROUTER: 1_500_000_000, Phase.DISPATCH: 500_000_000},
        warmup=warmup,
        barriers=(BARRIER,),
    )
    load = LayerLoad(
        layer=1,
        forward_mode=ForwardMode.TRAIN,
        tokens=16,
        max_mean_ratio=1.5,
        cv=0.1,
        rank_max_mean_ratio=1.25,
        hot_expert=0,
        dead_experts=0,
    )
    return StepResult(joined=joined, verdict=verdict, loads=(load,))


def samples(book: SeriesBook) -> dict[str, float]:
    """Samples by their text form, from the exposition itself."""
    registry = make_registry(
        book, lambda: LedgerSnapshot(received=0, joined=0, late=0, duplicate=0, pending=0)
    )
    found = {}
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_a_step_becomes_seconds_by_phase_rank_and_cause() -> None:
    """One verdict moves exactly these series, in seconds."""
    book = SeriesBook()
    PrometheusSink(book, series_budget=100).take_step(result())
    got = {
        name: value
        for name, value in samples(book).items()
        if name.startswith("moetrace_") and "_collector_" not in name and "bucket" not in name and value
    }
    assert got == {
        'moetrace_step_seconds_count{forward_mode="train",run_id="r"}': 1,
        'moetrace_step_seconds_sum{forward_mode="train",run_id="r"}': 2.0,
        'moetrace_critical_path_seconds_total{forward_mode="train",phase="router",run_id="r"}': 1.5,
        'moetrace_critical_path_seconds_total{forward_mode="train",phase="dispatch",run_id="r"}': 0.5,
        'moetrace_extension_seconds_total{phase="router",rank="1",run_id="r"}': 0.25,
        'moetrace_verdicts_total{cause="device",evidence="clear",phase="router",run_id="r"}': 1,
        'moetrace_critical_steps_total{phase="router",rank="1",run_id="r"}': 1,
        'moetrace_worth_seconds_total{phase="router",rank="1",run_id="r"}': 0.25,
        'moetrace_transfer_seconds_total{phase="dispatch",run_id="r"}': 0.5,
        'moetrace_wait_seconds_total{phase="dispatch",run_id="r"}': 0.125,
        'moetrace_expert_load_imbalance_ratio{forward_mode="train",layer="1",run_id="r"}': 1.5,
        'moetrace_rank_load_imbalance_ratio{forward_mode="train",layer="1",run_id="r"}': 1.25,
        'moetrace_expert_load_cv_ratio{forward_mode="train",layer="1",run_id="r"}': 0.1,
        'moetrace_critical_cause_steps_total{cause="device",phase="router",rank="1",run_id="r"}': 1,
        'moetrace_exchange_transfer_seconds_count{forward_mode="train",phase="dispatch",run_id="r"}': 1,
        'moetrace_exchange_transfer_seconds_sum{forward_mode="train",phase="dispatch",run_id="r"}': 0.5,
        'moetrace_exchange_rows_total{phase="dispatch",run_id="r",scope="same_rank"}': 16,
        'moetrace_exchange_rows_total{phase="dispatch",run_id="r",scope="same_node"}': 16,
        'moetrace_exchange_rank_seconds_total{overlap="exposed",phase="combine",run_id="r"}': 0.00040147,
        'moetrace_exchange_rank_seconds_total{overlap="exposed",phase="dispatch",run_id="r"}': 0.000403855,
        "moetrace_group_transfer_seconds_total"
        '{ep_group="0",forward_mode="train",phase="dispatch",run_id="r"}': 0.5,
        'moetrace_group_exchanges_total{ep_group="0",forward_mode="train",phase="dispatch",run_id="r"}': 1,
        "moetrace_group_exchange_bytes_total"
        '{ep_group="0",forward_mode="train",phase="dispatch",run_id="r"}': 256,
        'moetrace_group_info{ep_group="0",hosts="host-0",ranks="2",run_id="r"}': 1,
        'moetrace_run_info{model_name="synthetic-moe",model_version="",run_id="r"}': 1,
        'moetrace_routed_pairs_total{forward_mode="train",run_id="r"}': 32,
        **{
            "moetrace_expert_tokens_total"
            f'{{expert="{expert}",forward_mode="train",layer="{layer}",run_id="r"}}': 4
            for layer in range(2)
            for expert in range(4)
        },
    }


def test_a_metric_is_shown_once_whoever_fills_it() -> None:
    """A moetrace join that gets its lease back begins anew, with the series that it had."""
    book = SeriesBook()
    for _ in range(2):
        book.counter(metrics.PLACEMENT_ROWS_TOTAL).add(labels=("r", "applied"))
    assert book.gauge(metrics.PLACEMENT_REPLICAS) is book.gauge(metrics.PLACEMENT_REPLICAS)
    [family] = [one for one in book.collect() if one.name == metrics.PLACEMENT_ROWS_TOTAL.name[:-6]]
    assert [sample.value for sample in family.samples] == [2.0]


def test_warm_up_steps_are_left_out() -> None:
    """A step marked as warm-up moves no series of its run."""
    book = SeriesBook()
    PrometheusSink(book, series_budget=100).take_step(result(warmup=True))
    assert not [name for name in samples(book) if 'run_id="r"' in name]


def test_a_run_beyond_the_budget_shows_its_hottest_experts_by_slot() -> None:
    """Over the budget there are slots with their expert's id and one `other`, adding up to all pairs."""
    book = SeriesBook()
    PrometheusSink(book, series_budget=60).take_step(result(num_experts=64))
    got = samples(book)
    assert not [name for name in got if name.startswith("moetrace_expert_tokens_total")]
    for layer in range(2):
        slots = [
            got[
                f'moetrace_expert_slot_tokens_total{{forward_mode="train",layer="{layer}",run_id="r",slot="{slot}"}}'
            ]
            for slot in (*range(8), "other")
        ]
        assert sum(slots) == 2 * RUN.num_pairs
    # All pairs of step 0 go to one expert per layer: layer 1's is expert 1.
    assert got['moetrace_expert_slot_id{forward_mode="train",layer="1",run_id="r",slot="0"}'] == 1


def test_series_of_experts_never_exceed_the_budget() -> None:
    """Whatever runs come, per-expert label sets stay within the budget, and what is refused is counted."""
    book = SeriesBook()
    sink = PrometheusSink(book, series_budget=30)
    for number in range(6):
        sink.take_step(result(run_id=f"run-{number}", num_experts=16))
        used = [name for name in samples(book) if name.startswith("moetrace_expert_") and "ratio" not in name]
        assert len(used) <= 30
    refused = samples(book)['moetrace_series_refused_total{metric="moetrace_expert_slot_tokens_total"}']
    assert refused > 0


def test_the_run_silent_longest_makes_room_for_a_new_one() -> None:
    """A collector that lives for months keeps the newest runs' series and forgets the rest."""
    book = SeriesBook()
    sink = PrometheusSink(book, series_budget=20_000)
    for number in range(MAX_RUNS):
        sink.take_step(result(run_id=f"run-{number}"))
    sink.take_step(result(step=1, run_id="run-0"))
    sink.take_step(result(run_id="new"))
    names = " ".join(samples(book))
    assert 'run_id="run-0"' in names
    assert 'run_id="run-1"' not in names
    assert 'run_id="new"' in names


def test_a_metric_never_has_more_label_sets_than_the_catalogue_says() -> None:
    """Beyond max_series a label set is refused and counted under the metric's name."""
    book = SeriesBook()
    counter = book.counter(metrics.COLLECTOR_STEPS_TOTAL)
    for number in range(10):
        counter.add(labels=(str(number),))
    got = samples(book)
    assert len([name for name in got if name.startswith("moetrace_collector_steps_total")]) == 6
    assert got['moetrace_series_refused_total{metric="moetrace_collector_steps_total"}'] == 4


def test_exposed_names_and_labels_are_those_of_the_catalogue() -> None:
    """Every exposed metric is in the catalogue with the same type and labels, and none of it is missing."""
    book = SeriesBook()
    own = SelfMetrics(book)
    sink = PrometheusSink(book, series_budget=8)
    sink.take_step(result())
    sink.take_step(result(step=1, run_id="second", num_experts=64))
    ledger = LedgerSink(
        None, database="m", book=book, unix_ms=lambda: 0, on_conflict=lambda _: None, on_lost=lambda *_: None
    )
    assert ledger.num_written == ledger.num_taken
    own.step_closed(result().joined)
    own.rows_stored("phase_spans", 1)
    own.rows_lost("phase_spans", 1)
    own.sink_failed("clickhouse")
    own.verdict_latency.observe(0.1)
    book.refuse(metrics.EXPERT_TOKENS_TOTAL)
    snapshot = LedgerSnapshot(
        received=1, joined=1, late=0, duplicate=0, pending=0, rejected={RejectReason.BODY_TOO_LARGE: 1}
    )
    registry = make_registry(book, lambda: snapshot)
    registry.register(WalMetrics(num_bytes=lambda: 5, num_syncs=lambda: 1))
    text = generate_latest(registry).decode()
    catalogue = {spec.name: spec for spec in metrics.ALL if spec.side == "collector"}
    seen = set()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        spec = catalogue[name]
        seen.add(name)
        assert family.type == spec.kind
        assert family.documentation == spec.help
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), sample
    assert seen == set(catalogue)


def test_the_placement_before_the_last_change_is_what_a_rollback_goes_back_to() -> None:
    """The previous epoch is absent until a change was seen, and survives steps without one."""
    book = SeriesBook()
    sink = PrometheusSink(book, series_budget=100)
    seen = []
    for step, version in enumerate((3, 3, 4, 4)):
        given = result(step)
        ranks = tuple(replace(rank, placement_version=version) for rank in given.joined.rank_steps)
        sink.take_step(replace(given, joined=replace(given.joined, rank_steps=ranks)))
        found = samples(book)
        seen.append(
            (
                found['moetrace_placement_version{run_id="r"}'],
                found.get('moetrace_placement_previous_version{run_id="r"}'),
            )
        )
    assert seen == [(3, None), (3, None), (4, 3), (4, 3)]


def test_missing_ranks_are_counted_each() -> None:
    """A rank that did not arrive has a series of its own, so that an alert can name it."""
    book = SeriesBook()
    sink = PrometheusSink(book, series_budget=100)
    given = result()
    sink.take_step(replace(given, verdict=replace(given.verdict, missing_ranks=(1,))))
    assert samples(book)['moetrace_missing_rank_steps_total{rank="1",run_id="r"}'] == 1


def test_rows_are_told_apart_by_how_far_they_travel() -> None:
    """Rank itself, same host, other host; a receiver that did not arrive is unknown, not local."""
    first, second, third = SyntheticRun(world_size=3, num_layers=1, num_experts=9, num_pairs=9).step(0)
    steps = (replace(first, host_name="a"), replace(second, host_name="a"), replace(third, host_name="b"))
    assert rows_by_scope(steps) == {
        ("dispatch", "same_rank"): 9,
        ("dispatch", "same_node"): 6,
        ("dispatch", "cross_node"): 12,
    }
    assert rows_by_scope(steps[:1]) == {("dispatch", "same_rank"): 3, ("dispatch", "unknown"): 6}


def test_an_exchange_beside_compute_is_hidden() -> None:
    """On a stream of its own it is hidden as far as the compute stream is busy; on one stream nothing is."""
    (rank,) = SyntheticRun(world_size=1, num_layers=1).step(0)
    columns = rank.phases
    dispatch = columns.phase == PHASE_CODE[Phase.DISPATCH]
    duration = int(columns.duration_ns[dispatch].sum())
    alone = exchange_time_ns((rank,))
    assert (alone["dispatch", "exposed"], alone["dispatch", "hidden"]) == (duration, 0)
    # The exchange moves to stream 1 and begins with the step, where the compute stream is busy.
    beside = replace(
        columns,
        stream=np.where(dispatch, 1, columns.stream),
        start_offset_ns=np.where(dispatch, 0, columns.start_offset_ns),
    )
    hidden = exchange_time_ns((replace(rank, phases=beside),))
    assert (hidden["dispatch", "exposed"], hidden["dispatch", "hidden"]) == (0, duration)


def test_groups_are_told_apart_and_say_their_hosts() -> None:
    """Bytes to other ranks only, hosts of each group by name, and how many more where there are many."""
    one, other = RUN.step(0)
    far = replace(other, rank=2, ep_group=2, ep_rank=0, host_name="host-b")
    sent = bytes_by_group((one, other, far))
    [traffic] = [row for row in one.traffic if row.layer == 0]
    elsewhere = int(traffic.rows.sum() - traffic.rows[0]) * traffic.row_bytes * RUN.num_layers
    assert sent[0, "dispatch"] == 2 * elsewhere
    assert sent[2, "dispatch"] == elsewhere
    assert members_of((one, other, far)) == {0: (2, "host-0"), 2: (1, "host-b")}
    spread = tuple(replace(one, rank=rank, host_name=f"h{rank}") for rank in range(6))
    assert members_of(spread) == {0: (6, "h0,h1,h2,h3 and 2 more")}


def test_a_group_has_one_info_whatever_its_hosts_become() -> None:
    """A group that moves to another host keeps the first set: two would double what is joined with it."""
    book = SeriesBook()
    sink = PrometheusSink(book, series_budget=100)
    sink.take_step(result(0))
    moved = result(1)
    ranks = tuple(replace(one, host_name="elsewhere") for one in moved.joined.rank_steps)
    sink.take_step(replace(moved, joined=replace(moved.joined, rank_steps=ranks)))
    found = [name for name in samples(book) if name.startswith("moetrace_group_info")]
    assert found == ['moetrace_group_info{ep_group="0",hosts="host-0",ranks="2",run_id="r"}']


def test_what_tracers_cost_is_summed_beside_the_steps_that_say_it() -> None:
    """One rank says 0.25 s of its step, the other says nothing and is in neither sum."""
    book = SeriesBook()
    told = result(0)
    one, other = told.joined.rank_steps
    ranks = (replace(one, tracer_ns=250_000_000, duration_ns=2_000_000_000), other)
    PrometheusSink(book, series_budget=100).take_step(
        replace(told, joined=replace(told.joined, rank_steps=ranks))
    )
    series = samples(book)
    assert series['moetrace_tracer_seconds_total{run_id="r"}'] == 0.25
    assert series['moetrace_traced_rank_seconds_total{run_id="r"}'] == 2.0


def test_contradictions_and_coverage_are_told_by_run() -> None:
    """Violations of ranks and of groups add up by reason; coverage is a ratio per rank, where it is said."""
    before = result()
    first, second = before.joined.rank_steps
    ranks = (
        replace(first, violations=(ViolationCount(layer=0, violation=0, count=3),), expected_sites=8),
        replace(second, violations=(ViolationCount(layer=1, violation=4, count=2),)),
    )
    group = GroupViolation(
        ep_group=0,
        microbatch=0,
        forward_mode=ForwardMode.TRAIN,
        layer=1,
        violation=RoutingViolation.CONSERVATION,
        count=5,
    )
    book = SeriesBook()
    PrometheusSink(book, series_budget=100).take_step(
        replace(before, joined=replace(before.joined, rank_steps=ranks), violations=(group,))
    )
    got = samples(book)
    assert got['moetrace_routing_violations_total{reason="id_out_of_range",run_id="r"}'] == 3
    assert got['moetrace_routing_violations_total{reason="conservation",run_id="r"}'] == 7
    assert {name: value for name, value in got.items() if "site_coverage" in name} == {
        'moetrace_rank_site_coverage_ratio{rank="0",run_id="r"}': 0.0
    }


def test_rows_executed_and_dummy_batches_are_no_load() -> None:
    """The first are in the receipt, the second are told as left out."""
    before = result()
    first, second = before.joined.rank_steps
    counts = np.array([4, 0, 0, 0], dtype=np.int64)
    ranks = (
        replace(first, experts=(ExpertCounts(layer=0, kind=6, counts=counts),)),
        replace(second, experts=(ExpertCounts(layer=0, kind=7, counts=counts[:1]),)),
    )
    book = SeriesBook()
    PrometheusSink(book, series_budget=100).take_step(
        replace(before, joined=replace(before.joined, rank_steps=ranks))
    )
    got = samples(book)
    assert {name: v for name, v in got.items() if "pairs" in name or "expert_tokens" in name} == {
        'moetrace_excluded_pairs_total{reason="dummy",run_id="r"}': 4
    }
