"""Expert-load dumps of every kind become one record; what is no load is counted apart."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.load_dumps import LoadRecording, merge, read_load_dump, read_load_dumps
from moetrace_schemas.enums import ForwardMode

COUNTS = np.array([[[5, 0, 3, 8], [1, 1, 7, 7]], [[2, 2, 2, 2], [0, 4, 4, 0]]])
"""[2 steps, 2 layers, 4 experts]"""
DATA = Path(__file__).parents[2] / "data" / "loads"


def written(tmp_path: Path, text: str | bytes, name: str = "dump") -> Path:
    """A file of that content."""
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def lines(tmp_path: Path, *records: dict[str, Any]) -> Path:
    """JSON lines."""
    return written(tmp_path, "\n".join(json.dumps(record) for record in records) + "\n", "routes.jsonl")


def same(recording: LoadRecording) -> None:
    """It holds COUNTS."""
    assert recording.counts.tolist() == COUNTS.tolist()
    assert recording.layers.tolist() == [0, 1]
    assert recording.num_experts == 4


def test_sglang_statistics(tmp_path: Path) -> None:
    """`logical_count` of [steps][layers][experts], or of [layers][experts] for one step."""
    dump = {"rank": 0, "logical_count": COUNTS.tolist(), "average_utilization_rate_over_window": None}
    recording = read_load_dump(written(tmp_path, json.dumps(dump)))
    same(recording)
    assert recording.format == "sglang_expert_distribution"
    one = read_load_dump(written(tmp_path, json.dumps({"logical_count": COUNTS[0].tolist()})))
    assert one.counts.tolist() == COUNTS[:1].tolist()


def test_sglang_passes_map_slots_back_and_sum_ranks(tmp_path: Path) -> None:
    """Per-pass records of two ranks: replicas of one expert are one expert, equal passes are one step."""
    records = [
        {
            "forward_pass_id": p,
            "rank": r,
            "gatherer_key": "primary",
            "global_physical_count": [[p, 1, 2, 10 * r]],
        }
        for p in (4, 7)
        for r in (0, 1)
    ]
    dump = {"records": records, "last_physical_to_logical_map": [[0, 1, 2, 0]]}
    recording = read_load_dump(written(tmp_path, json.dumps(dump)))
    assert recording.steps.tolist() == [4, 7]
    assert recording.counts.tolist() == [[[18, 2, 4]], [[24, 2, 4]]]


def test_wide_and_long_csv_and_parquet_and_npz(tmp_path: Path) -> None:
    """Five ways to write the same table."""
    long = ["step,layer_id,expert_id,count"]
    wide = ["step,layer,expert_0,expert_1,expert_2,expert_3"]
    for step, layers in enumerate(COUNTS.tolist()):
        for layer, counts in enumerate(layers):
            wide.append(",".join(map(str, [step, layer, *counts])))
            long += [f"{step},{layer},{expert},{count}" for expert, count in enumerate(counts)]
    same(read_load_dump(written(tmp_path, "\n".join(long)), num_experts=4))
    same(read_load_dump(written(tmp_path, "\ufeff" + "\r\n".join(wide))))
    np.savez(tmp_path / "a.npz", counts=COUNTS, layers=np.array([0, 1]), top_k=np.array(2))
    same(read_load_dump(tmp_path / "a.npz"))
    rows = [[int(cell) for cell in line.split(",")] for line in long[1:]]
    columns = dict(zip(("step", "layer", "expert", "tokens"), np.array(rows).T, strict=True))
    np.savez(tmp_path / "b.npz", **columns)
    same(read_load_dump(tmp_path / "b.npz"))
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table(columns), tmp_path / "c.parquet")
    same(read_load_dump(tmp_path / "c.parquet"))


def route(expert_ids: list[int], **more: Any) -> dict[str, Any]:
    """A line of a vLLM-style route log."""
    return {"type": "route", "req_id": "r1", "token_idx": 0, "layer": 0, "topk_ids": expert_ids, **more}


META = {"type": "meta", "model_id": "Qwen", "num_experts": 4, "top_k": 2, "layers_logged": [0]}


def test_vllm_routes_without_warm_up_and_dummy_rows(tmp_path: Path) -> None:
    """Rows that say what they are, and rows without a request beside rows that have one, are no load."""
    recording = read_load_dump(
        lines(
            tmp_path,
            META,
            route([0, 1], warmup=True),
            route([0, 1], req_id="warmup-0"),
            route([0, 1], is_dummy=True),
            route([0, 1], req_id=None),
            route([1, 2]),
            route([1, 3], req_id="r2"),
            route([-1, 9]),
        )
    )
    assert recording.counts.tolist() == [[[0, 2, 1, 1]]]
    assert recording.left_out == {"warmup": 4, "dummy": 4, "padding": 1, "invalid": 1}
    assert (recording.model_name, recording.top_k) == ("Qwen", 2)
    assert any("4 (token, slot) pairs of warmup rows" in warning for warning in recording.warnings)


def test_rows_without_a_request_count_where_none_has_one(tmp_path: Path) -> None:
    """A logger that knows no requests logs no dummies by that."""
    record = {key: value for key, value in route([1, 2]).items() if key != "req_id"}
    assert read_load_dump(lines(tmp_path, META, record, record)).counts.sum() == 4


def test_a_batch_of_one_repeated_token_is_a_dummy(tmp_path: Path) -> None:
    """Equal experts and weights 32 times in a row: no prompt does that. Without weights it cannot be told."""
    weighted = [route([0, 1], topk_weights=[0.7, 0.3]) for _ in range(32)]
    real = [route([2, 3], topk_weights=[0.6 + i / 1000, 0.4]) for i in range(40)]
    recording = read_load_dump(lines(tmp_path, META, *weighted, *real))
    assert recording.counts.tolist() == [[[0, 0, 40, 40]]]
    assert recording.left_out == {"dummy": 64}
    assert read_load_dump(lines(tmp_path, META, *([route([0, 1])] * 50))).counts.sum() == 100


def test_steps_and_forward_modes_are_kept_apart(tmp_path: Path) -> None:
    """Prefill and decode of one step are two entries."""
    recording = read_load_dump(
        lines(
            tmp_path, META,
            route([0, 1], step=3, forward_mode="prefill"), route([2, 3], step=3, forward_mode="decode"),
            route([0, 0], step=1, forward_mode="decode"),
        )
    )  # fmt: skip
    assert recording.steps.tolist() == [1, 3, 3]
    assert recording.forward_modes == (ForwardMode.DECODE, ForwardMode.DECODE, ForwardMode.PREFILL)
    assert recording.counts[:, 0].tolist() == [[2, 0, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]]


def test_routes_of_all_layers_per_request(tmp_path: Path) -> None:
    """[tokens][layers][k], as engines return them with a request."""
    recording = read_load_dump(
        lines(tmp_path, {"request_id": "a", "routed_experts": [[[0, 1], [2, 3]], [[0, 2], [3, 3]]]})
    )
    assert recording.counts.tolist() == [[[2, 1, 1, 0], [0, 0, 1, 3]]]
    assert "number of experts is not told" in recording.warnings[-1]


def test_megatron_router_trace_keeps_prediction_layers_apart(tmp_path: Path) -> None:
    """MTP layers share numbers with the decoder's; they follow after them under a name of their own."""

    def record(step: int, layer: int, indices: list[list[int]], **more: Any) -> dict[str, Any]:
        return {"step": step, "stage": "pre_dispatch", "block": "mtp" if more else "decoder", "layer": layer,
                "rank": 0, "num_tokens": len(indices), "topk": 2, "top_indices": indices, **more}  # fmt: skip

    path = lines(
        tmp_path, record(0, 3, [[0, 1], [1, 2]]), record(0, 3, [[3, 3]], mtp_idx=0), record(1, 3, [[0, 1]])
    )
    recording = read_load_dump(path, num_experts=4)
    assert recording.format == "megatron_router_trace"
    assert recording.layer_names == ("3", "mtp 0.3")
    assert recording.layers.tolist() == [3, 4]
    assert recording.counts.tolist() == [[[1, 2, 1, 0], [0, 0, 0, 2]], [[1, 1, 0, 0], [0, 0, 0, 0]]]
    both = merge([recording, recording])
    assert both.counts.tolist() == (2 * recording.counts).tolist()


def test_several_recordings_by_name() -> None:
    """One file, one recording per name; asking for one of several says which there are."""
    path = DATA / "olmoe_mixtral_expected.json"
    recordings = read_load_dumps(path)
    assert [recording.source.split("#")[1] for recording in recordings] == [
        "mixtral-8x7b/book", "mixtral-8x7b/c4", "olmoe/book", "olmoe/c4"]  # fmt: skip
    with pytest.raises(UsageError, match="one recording expected, got 4"):
        read_load_dump(path)


def own_line(step: int, *, warmup: bool, counts: list[int]) -> dict[str, Any]:
    """A line of the library's file emitter with one row of counts and no phases."""
    names = ("layer", "phase", "direction", "microbatch", "ordinal", "stream", "flags", "start_offset_ns",
             "duration_ns", "bytes", "rows")  # fmt: skip
    return {
        "schema_version": 1, "run_id": "r", "step": step, "rank": 0, "world_size": 1, "ep_rank": 0,
        "ep_size": 1, "ep_group": 0, "microbatch": 0, "forward_mode": "train", "cohort": "", "warmup": warmup,
        "placement_version": 0, "clock": "host", "start_unix_ns": 1, "duration_ns": 1,
        "phases": {name: [] for name in names},
        "experts": [
            {"layer": 2, "kind": "routed", "counts": counts}, {"layer": 2, "kind": "received", "counts": [9]},
        ],
        "traffic": [],
    }  # fmt: skip


def test_own_files_give_their_routed_counts(tmp_path: Path) -> None:
    """Received rows are another unit, and warm-up is left out."""
    recording = read_load_dump(
        lines(tmp_path, own_line(0, warmup=True, counts=[7, 7]), own_line(1, warmup=False, counts=[1, 2]))
    )
    assert recording.counts.tolist() == [[[1, 2]]]
    assert recording.left_out == {"warmup": 14}
    assert recording.forward_modes == (ForwardMode.TRAIN,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{", "line 1 column 2: JSON expected"),
        (b"[" * 100_000, "nested less deeply"),
        (b'{"logical_count": [[1, 2], [3]]}', "logical_count: lists of equal length"),
        (b'{"logical_count": [[1, -2]]}', "counts of 0 or more"),
        (b'{"logical_count": [[1.5]]}', "whole numbers"),
        (b'{"logical_count": [[1e300]]}', "numbers of at most"),
        (b'{"logical_count": [["a"]]}', "whole numbers"),
        (b'{"logical_count": [[' + b"9" * 5_000 + b"]]}", "numbers of sane length"),
        (b'{"counts": [[1, 2]], "num_experts": 3}', "num_experts: 2 as in counts expected, got 3"),
        (b'{"counts": [[1, 2]], "axes": ["expert", "layer"]}', "axes: step, layer, expert"),
        (b'{"counts": [[1, 2]], "layers": [1, 2]}', "layers: 1 ascending numbers"),
        (b'{"topk_ids": [1], "layer": 0}\n{"topk_ids"', "line 2"),
        (b'{"topk_ids": [1], "layer": -1}', "line 1, layer"),
        (b'{"topk_ids": [99999999999], "layer": 0}', "at most 65536 experts"),
        (b'{"topk_ids": ["a"], "layer": 0}', "list of expert ids"),
        (b'{"topk_ids": [1], "layer": 0, "step": 1.5}', "line 1, step"),
        (b"layer,expert,count\n0,1\n", "line 2: 3 values expected, got 2"),
        (b"layer,expert,count\n0,1,many\n", "line 2, count: whole number expected, got 'many'"),
        (b"layer,expert,count\n0,1,1e30\n", "line 2, count"),
        (b"layer,expert,count\n0,1,-4\n", "counts"),
        (b"name,value\na,1\n", "layer, expert and count"),
        (b"PK\x03\x04rubbish", "archive of NumPy arrays"),
        (b"PAR1rubbishPAR1", "Parquet expected"),
        (b"\x1f\x8bnot gzip", "broken gzip"),
        (b"\x00\x01\x02", "binary"),
        (b'{"a": 1}', "counts under one of"),
    ],
)
def test_faults_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    """File, place, what was expected."""
    path = written(tmp_path, content)
    with pytest.raises(UsageError) as failure:
        read_load_dump(path)
    assert message in str(failure.value)
    assert str(path) in str(failure.value)
    assert "\n" not in str(failure.value)


def test_pickled_arrays_are_not_opened(tmp_path: Path) -> None:
    """An archive that would run code when read is refused."""
    np.savez(tmp_path / "x.npz", counts=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UsageError, match="archive of NumPy arrays expected"):
        read_load_dump(tmp_path / "x.npz")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """Never another exception."""
    path = written(tmp_path_factory.mktemp("any"), content)
    with contextlib.suppress(UsageError):
        read_load_dumps(path)
