"""PyTorch profiler traces: what is kept of a file, and what each kernel is recognised as."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.host_rows import with_host_rows
from moetrace_collectors.offline.kineto import read_trace
from moetrace_collectors.offline.phases import DevicePhases, recognise
from moetrace_collectors.offline.rank_trace import RankTrace
from moetrace_collectors.offline.usage import rank_usage
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, Direction, Phase
from trace_files import REAL_NAMES, moe_traces

DATA = Path(__file__).parents[2] / "data" / "kineto"
ODD = sorted((DATA / "odd").glob("*.gz"))


def event(name: str, start: float, duration: float, category: str = "kernel", **more: Any) -> dict[str, Any]:
    """One whole event."""
    args = {key: more.pop(key) for key in ("correlation", "stream", "device") if key in more}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration,
            "args": args, **more}  # fmt: skip


def trace_of(tmp_path: Path, events: list[dict[str, Any]], **rest: Any) -> RankTrace:
    """Read back a document of these events."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**rest, "traceEvents": events}))
    return read_trace(path)


def phases_of(trace: RankTrace) -> list[Phase | None]:
    """Phase of each device row."""
    by_code = {code: phase for phase, code in PHASE_CODE.items()}
    return [by_code.get(code) for code in recognise(trace).phase.tolist()]


@pytest.mark.parametrize("path", ODD, ids=lambda path: path.name)
def test_traces_without_moe_give_no_phase(path: Path) -> None:
    """AMD, CPU-only, Triton, event-sync and begin/end traces load, and nothing is invented."""
    trace = with_host_rows(read_trace(path))
    phases = recognise(trace)
    assert not phases.is_moe.any()
    assert rank_usage(trace, phases).moe_layers == 0


def test_decode_step_of_vllm_has_the_published_figures() -> None:
    """Sums by phase, layers, busy and idle time of a replayed graph, by kernel names alone."""
    expected = json.loads((DATA / "vllm_mi300_decode" / "expected.json").read_text())
    trace = read_trace(DATA / "vllm_mi300_decode" / "graph_execution.json.gz")
    usage = rank_usage(trace, recognise(trace))
    found = {name: (time.kernels, time.duration_ns / 1000) for name, time in usage.phases.items()}
    found["combine_unpermute"] = found.pop("unpermute")
    assert set(found) == set(expected["phases"])
    for name, phase in expected["phases"].items():
        assert found[name] == (phase["n"], pytest.approx(phase["us"], abs=0.001)), name
    assert len(trace.device) == expected["gpu_events"]
    assert usage.moe_layers == expected["moe_layers"]
    # The published sums are made with floats, which at these times hold a nanosecond each.
    assert usage.busy_ns / 1000 == pytest.approx(expected["busy_us"], abs=0.02)
    assert (usage.busy_ns + usage.idle_ns) / 1000 == pytest.approx(expected["total_us"], abs=0.02)
    assert usage.idle_ns / 1000 == pytest.approx(expected["idle_us"], abs=0.02)
    assert usage.exposed_communication_ns == 0


def test_recommender_with_all_to_alls_is_no_moe() -> None:
    """Real all-to-alls, sorts and a kernel called permute, and not one MoE phase."""
    for path in sorted((DATA / "dlrm_4ranks").glob("*.gz")):
        assert not recognise(read_trace(path)).is_moe.any()


def test_plain_and_gzip_and_bare_array_read_the_same(tmp_path: Path) -> None:
    """The form of the file is told by its content."""
    events = [event("a", 5, 2), event("b", 1.5, 0.25)]
    document = json.dumps({"traceEvents": events}).encode()
    (tmp_path / "zipped.json").write_bytes(gzip.compress(document))
    (tmp_path / "bare").write_text(json.dumps(events))
    for trace in (
        trace_of(tmp_path, events),
        read_trace(tmp_path / "zipped.json"),
        read_trace(tmp_path / "bare"),
    ):
        assert trace.device.start_ns.tolist() == [1_500, 5_000]
        assert trace.device.duration_ns.tolist() == [250, 2_000]
        assert [trace.names[name] for name in trace.device.name] == ["b", "a"]


def test_fractions_of_a_microsecond_stay_exact(tmp_path: Path) -> None:
    """Days of uptime in microseconds with three decimals lose no nanosecond."""
    trace = trace_of(tmp_path, [event("a", 6520618861858.561, 3.519)], baseTimeNanoseconds=17 * 10**17)
    assert trace.device.start_ns.tolist() == [6_520_618_861_858_561]
    assert trace.device.duration_ns.tolist() == [3_519]
    assert trace.base_unix_ns == 17 * 10**17


def test_begin_and_end_pair_up_per_thread(tmp_path: Path) -> None:
    """Nested pairs on two threads; an end without a begin and a begin without an end are counted."""
    marks = [
        ("B", "dispatch", 1, 1), ("B", "inner", 2, 1), ("B", "combine", 2, 2), ("E", "inner", 3, 1),
        ("E", "dispatch", 5, 1), ("E", "combine", 9, 2), ("E", "late", 10, 2), ("B", "open", 11, 1),
    ]  # fmt: skip
    events = [{"ph": ph, "name": name, "ts": ts, "pid": 1, "tid": tid} for ph, name, ts, tid in marks]
    trace = trace_of(tmp_path, events)
    found = {
        trace.names[name]: duration
        for name, duration in zip(trace.annotations.name, trace.annotations.duration_ns.tolist(), strict=True)
    }
    assert found == {"dispatch": 4_000, "inner": 1_000, "combine": 7_000}
    assert trace.left_out == {"end without begin": 1, "begin without end": 1}


def test_rank_comes_from_the_file_then_from_its_name(tmp_path: Path) -> None:
    """distributedInfo, rank<number> in the name, or nothing."""
    assert trace_of(tmp_path, [], distributedInfo={"rank": 5, "world_size": 8}).rank == 5
    assert not trace_of(tmp_path, []).rank_told
    (tmp_path / "worker_rank12.json").write_text('{"traceEvents": []}')
    assert read_trace(tmp_path / "worker_rank12.json").rank == 12


@pytest.mark.parametrize("value", [1e300, -1e17, 10**30, float("nan"), float("inf")])
def test_times_that_no_clock_shows_are_refused(tmp_path: Path, value: float) -> None:
    """A number that does not fit names its event and field."""
    with pytest.raises(UsageError, match="event 1, ts: microseconds below"):
        trace_of(tmp_path, [event("a", 0, 1), event("b", value, 1)])


@pytest.mark.parametrize("broken", [{"ts": "soon"}, {"ts": None}, {"dur": -1}, {"dur": [1]}])
def test_events_without_a_time_are_counted(tmp_path: Path, broken: dict[str, Any]) -> None:
    """One bad event does not cost the file."""
    trace = trace_of(tmp_path, [{**event("a", 0, 1), **broken}, event("b", 0, 1)])
    assert len(trace.device) == 1
    assert trace.left_out == {"no usable time": 1}


def test_odd_fields_do_no_harm(tmp_path: Path) -> None:
    """Missing names, lists for ids, text for numbers, unknown phases of the format."""
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1, "dur": 1},
        {"ph": "X", "cat": ["kernel"], "name": 5, "ts": 1, "dur": 1, "pid": [1], "tid": {}},
        {"ph": "X", "cat": "kernel", "name": None, "ts": "2.5", "dur": 1, "args": 7},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "k",
            "ts": 3,
            "dur": 1,
            "args": {"correlation": "12", "stream": [0]},
        },
        {"ph": "Q"},
        {},
    ]
    trace = trace_of(tmp_path, events, distributedInfo=[1], baseTimeNanoseconds="x")
    assert trace.device.start_ns.tolist() == [1_000, 2_500, 3_000]
    assert trace.device.correlation.tolist() == [-1, -1, 12]


def launched(
    name: str, start: float, duration: float, correlation: int, launch: float
) -> list[dict[str, Any]]:
    """A kernel and the runtime call that launched it, on thread 1."""
    return [
        event(name, start, duration, correlation=correlation),
        {
            **event("cudaLaunchKernel", launch, 0.5, "cuda_runtime", correlation=correlation),
            "pid": 9,
            "tid": 1,
        },
    ]


def mark(name: str, start: float, end: float, thread: int = 1) -> dict[str, Any]:
    """An annotation on a thread."""
    return {**event(name, start, end - start, "user_annotation"), "pid": 9, "tid": thread}


def test_innermost_known_annotation_around_the_launch_wins(tmp_path: Path) -> None:
    """The launch and not the kernel lies inside; unknown marks in between are looked through.

    ::

        thread 1   |------- moe_layer_4 -----------------|
                     |-- dispatch --|  |- experts -|
                       |-my mark-|
        launches          x               x          x
        kernels                                            (all later)
    """
    trace = trace_of(
        tmp_path,
        [
            mark("moe_layer_4", 0, 100), mark("layer 4 dispatch", 5, 30), mark("my mark", 10, 25),
            mark("experts", 40, 60),
            *launched("k1", 200, 5, 1, 15), *launched("k2", 210, 5, 2, 50), *launched("k3", 220, 5, 3, 80),
            *launched("k4", 230, 5, 4, 150),
        ],
    )  # fmt: skip
    assert phases_of(trace) == [Phase.DISPATCH, Phase.EXPERT_GEMM, Phase.FUSED, None]
    assert recognise(trace).layer.tolist()[0] == 4


def test_annotation_goes_before_the_kernel_name(tmp_path: Path) -> None:
    """Inside a phase every kernel is that phase's; under attention a top-k is no router."""
    trace = trace_of(
        tmp_path,
        [
            mark("dispatch", 0, 10), mark("attn", 20, 30),
            *launched("_topk_forward", 100, 5, 1, 5), *launched("_topk_forward", 110, 5, 2, 25),
            *launched("_topk_forward", 120, 5, 3, 40),
        ],
    )  # fmt: skip
    assert phases_of(trace) == [Phase.DISPATCH, None, Phase.ROUTER]


def test_backward_launched_from_another_thread_is_found(tmp_path: Path) -> None:
    """Autograd launches from a thread without marks; the mark of the thread that waits for it counts."""
    trace = trace_of(
        tmp_path,
        [
            mark("combine_bwd", 0, 50, thread=2),
            mark("dispatch", 40, 60, thread=3),
            *launched("k", 100, 5, 1, 20),
        ],
    )
    assert phases_of(trace) == [Phase.COMBINE]
    assert recognise(trace).direction.tolist() == [DIRECTION_CODE[Direction.BACKWARD]]


def test_mlp_is_experts_only_beside_dispatch_or_combine(tmp_path: Path) -> None:
    """The same mark in a dense model is a dense layer."""
    dense = [mark("mlp", 0, 10), *launched("gemm", 100, 5, 1, 5)]
    assert phases_of(trace_of(tmp_path, dense)) == [None]
    assert phases_of(trace_of(tmp_path, [*dense, mark("dispatch", 20, 30)])) == [Phase.EXPERT_GEMM]


def in_order(tmp_path: Path, names: list[str]) -> list[Phase | None]:
    """Phases of kernels that run one after the other."""
    return phases_of(trace_of(tmp_path, [event(name, 10 * i, 5) for i, name in enumerate(names)]))


EXCHANGE, GEMM, ROUTER = REAL_NAMES["dispatch"], REAL_NAMES["expert_gemm"], REAL_NAMES["router"]
SORT, SUM, ATTENTION = REAL_NAMES["permute"], REAL_NAMES["unpermute"], REAL_NAMES["attention"]


def test_send_recv_is_told_by_its_place(tmp_path: Path) -> None:
    """Before the experts a dispatch, after them a combine, anywhere else plain communication."""
    assert in_order(
        tmp_path,
        [EXCHANGE, ATTENTION, ROUTER, SORT, EXCHANGE, GEMM, GEMM, EXCHANGE, SUM, ATTENTION, EXCHANGE],
    ) == [None, None, Phase.ROUTER, Phase.PERMUTE, Phase.DISPATCH, Phase.EXPERT_GEMM, Phase.EXPERT_GEMM,
          Phase.COMBINE, Phase.UNPERMUTE, None, None]  # fmt: skip


def test_two_exchanges_between_experts_are_combine_and_dispatch(tmp_path: Path) -> None:
    """Without a router of a known name the order still tells; one alone does not."""
    assert in_order(tmp_path, [GEMM, EXCHANGE, ATTENTION, EXCHANGE, GEMM])[1::2] == [
        Phase.COMBINE,
        Phase.DISPATCH,
    ]
    assert in_order(tmp_path, [GEMM, EXCHANGE, GEMM])[1] is None


def test_exchanges_without_experts_are_communication(tmp_path: Path) -> None:
    """Routing and all-to-alls alone make no dispatch."""
    assert in_order(tmp_path, [ROUTER, EXCHANGE, EXCHANGE])[1:] == [None, None]


def test_general_kernels_count_only_inside_a_layer(tmp_path: Path) -> None:
    """PyTorch's top-k routes before experts, and samples after the last of them."""
    topk = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(TensorInfo<float>)"
    assert in_order(tmp_path, [topk, SORT, GEMM, SUM, topk]) == [
        Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE, None]  # fmt: skip
    assert in_order(tmp_path, [topk, ATTENTION, topk]) == [None, None, None]


def test_layers_are_counted_where_none_is_annotated(tmp_path: Path) -> None:
    """A router after the experts begins the next layer; each step counts from 0."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(moe_traces(ranks=1, steps=2, layers=3)[0]))
    phases = recognise(read_trace(path))
    routers = phases.phase == PHASE_CODE[Phase.ROUTER]
    assert phases.layer[routers].tolist() == [0, 1, 2, 0, 1, 2]
    assert phases.step[routers].tolist() == [0, 0, 0, 1, 1, 1]
    assert phases.steps == (0, 1)


def durations(trace: RankTrace, phases: DevicePhases) -> dict[str, int]:
    """Us by phase."""
    return {name: time.duration_ns // 1000 for name, time in rank_usage(trace, phases).phases.items()}


def test_annotated_and_named_traces_give_the_same_times(tmp_path: Path) -> None:
    """Two ways to recognise one run agree."""
    found = []
    for annotated in (False, True):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(moe_traces(ranks=1, annotated=annotated)[0]))
        trace = read_trace(path)
        found.append(durations(trace, recognise(trace)))
    assert found[0] == found[1]


def test_host_marks_stand_in_for_a_device(tmp_path: Path) -> None:
    """Without kernels, marks are the rows: what is inside another takes its time, also across threads.

    ::

        thread 1   |---- dispatch 0-20 ----|-- experts 20-50 --|
        gloo              |5-15|
    """
    trace = with_host_rows(
        trace_of(
            tmp_path,
            [mark("dispatch", 0, 20), mark("gloo:all_to_all", 5, 15, thread=2), mark("experts", 20, 50)],
        )
    )
    phases = recognise(trace)
    usage = rank_usage(trace, phases)
    assert usage.phases["dispatch"].duration_ns == 20_000
    assert usage.phases["expert_gemm"].duration_ns == 30_000
    assert int(trace.device.duration_ns[phases.is_exchange].sum()) == 10_000
    assert phases.kind[int(np.flatnonzero(phases.communicates)[0])] == "all_to_all"
    assert (usage.busy_ns, usage.exposed_communication_ns) == (50_000, 10_000)


def test_exposed_communication_is_what_no_kernel_hides(tmp_path: Path) -> None:
    """Copies hide nothing; two collectives at once count once.

    ::

        kernel      |0 ---- 10|                |30-35|
        all-reduce       |5 -------- 20|
        all-gather               |15 ----- 28|
        copy                        |18-22|
        exposed               |10 ---------- 28|         18
    """
    reduce, gather = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_AllGather_RING_LL"
    trace = trace_of(
        tmp_path,
        [
            event("k", 0, 10), event(reduce, 5, 15, stream=9), event(gather, 15, 13, stream=10),
            event("Memcpy", 18, 4, "gpu_memcpy", stream=11), event("k", 30, 5),
        ],
    )  # fmt: skip
    usage = rank_usage(trace, recognise(trace))
    assert usage.exposed_communication_ns == 18_000
    assert (usage.busy_ns, usage.idle_ns) == (33_000, 2_000)


def test_engine_steps_are_numbered_in_order(tmp_path: Path) -> None:
    """Serving traces mark steps without numbers; layers count within each."""
    events: list[dict[str, Any]] = []
    for step in range(3):
        at = 1_000.0 * step
        events.append(mark(f"execute_{step}_context_0(sq0)_generation_32(sq32)", at, at + 100))
        for index, name in enumerate((ROUTER, GEMM, ROUTER, GEMM)):
            events += launched(name, at + 200 + 10 * index, 5, 10 * step + index, at + 10 + index)
    phases = recognise(trace_of(tmp_path, events))
    assert phases.steps == (0, 1, 2)
    assert phases.layer.tolist() == [0, 0, 1, 1] * 3


@pytest.mark.parametrize("info", [{"rank": 10**9}, {"rank": -4}, {"rank": "x", "world_size": 2**40}, 5, None])
def test_ranks_that_cannot_be_are_not_believed(tmp_path: Path, info: object) -> None:
    """A number beyond any machine would make lists of that length."""
    trace = trace_of(tmp_path, [], distributedInfo=info)
    assert (trace.rank, trace.world_size) == (-1, None)
