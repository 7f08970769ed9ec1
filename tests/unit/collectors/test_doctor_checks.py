"""Judgements of the go-live checklist: each can pass, fail and be unknown, and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from moetrace_collectors.doctor import checks
from moetrace_collectors.doctor.finding import Finding, Status
from moetrace_collectors.doctor.model_config import ModelShape, read_model_config
from moetrace_collectors.errors import UsageError

COVERED = {
    "world_size": 4, "ranks": 4, "ep_size": 4, "counted_layers": 3, "layers": 3, "layers_with_router": 3,
    "layers_with_experts": 3, "layers_with_exchange": 3, "fused_ns": 0, "layer_ns": 100,
}  # fmt: skip
SHAPE = {"experts": 8, "pairs_are_multiples_of": 12, "layers_with_shared_expert": 2}
TOPOLOGY = {
    "ranks": 4, "ranks_without_host": 0, "hosts": 2, "ep_groups": 1, "smallest_ep_size": 4,
    "largest_ep_size": 4, "world_size": 4,
}  # fmt: skip
DROPS = {"routed": 10_000, "dropped": 5, "invalid": 0, "lost_rank_steps": 0}
EXCHANGE = {"phase": "dispatch", "exchanges": 500, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}
OVERLAP = {
    "exchange_ns": 50, "asynchronous_ns": 0, "rank_ns": 100, "layers_with_shared_expert": 0,
    "microbatches": 1,
}  # fmt: skip
MODES = {"steps": 9, "mixed": 0, "prefill": 5, "decode": 4, "train": 0}
ROLLBACK = {"newest_version": 2, "version": 2, "rollback_version": 1, "versions_with_mapping": [1, 2]}
HOT = {"layer": 1, "rank": 0, "hot_experts": 2, "experts": [3, 5], "rank_load_over_mean": 1.5}


def with_(base: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """One row with changes."""
    return [{**base, **changes}]


CASES: list[tuple[str, Finding]] = [
    ("pass", checks.coverage(with_(COVERED))),
    ("fail", checks.coverage(with_(COVERED, layers=0))),
    ("fail", checks.coverage(with_(COVERED, ranks=3))),
    ("fail", checks.coverage(with_(COVERED, layers_with_experts=2))),
    ("fail", checks.coverage(with_(COVERED, layers_with_exchange=0))),
    ("pass", checks.coverage(with_(COVERED, layers_with_exchange=0, ep_size=1))),
    ("fail", checks.coverage(with_(COVERED, fused_ns=30))),
    ("pass", checks.model_shape(with_(SHAPE), ModelShape(top_k=4, experts=8, shared_experts=1))),
    ("fail", checks.model_shape(with_(SHAPE), ModelShape(top_k=5))),
    ("fail", checks.model_shape(with_(SHAPE), ModelShape(experts=9))),
    ("fail", checks.model_shape(with_(SHAPE), ModelShape(shared_experts=0))),
    ("fail", checks.model_shape(with_(SHAPE, layers_with_shared_expert=0), ModelShape(shared_experts=2))),
    ("unknown", checks.model_shape(with_(SHAPE), None)),
    ("unknown", checks.model_shape(with_(SHAPE, pairs_are_multiples_of=0), ModelShape(top_k=4))),
    ("pass", checks.drops(with_(DROPS))),
    ("fail", checks.drops(with_(DROPS, invalid=50))),
    ("unknown", checks.drops(with_(DROPS, routed=0, dropped=0))),
    ("fail", checks.drops(with_(DROPS, lost_rank_steps=26))),
    ("pass", checks.topology(with_(TOPOLOGY))),
    ("fail", checks.topology(with_(TOPOLOGY, ranks_without_host=1))),
    ("fail", checks.topology(with_(TOPOLOGY, world_size=8))),
    ("fail", checks.topology(with_(TOPOLOGY, smallest_ep_size=2))),
    ("pass", checks.all_to_all([EXCHANGE, EXCHANGE], ep_size=4)),
    ("fail", checks.all_to_all([EXCHANGE], ep_size=4)),
    ("fail", checks.all_to_all([], ep_size=4)),
    ("unknown", checks.all_to_all([], ep_size=1)),
    ("unknown", checks.all_to_all([EXCHANGE, {**EXCHANGE, "exchanges": 9}], ep_size=4)),
    ("pass", checks.cross_node([{"total_rows": 100, "cross_rows": 20, "hosts": 2}])),
    ("fail", checks.cross_node([{"total_rows": 100, "cross_rows": 30, "hosts": 2}])),
    ("unknown", checks.cross_node([])),
    ("pass", checks.hot_experts(with_(HOT, hot_experts=1), received=9)),
    ("pass", checks.hot_experts(with_(HOT, rank_load_over_mean=1.0), received=9)),
    ("fail", checks.hot_experts(with_(HOT), received=9)),
    ("unknown", checks.hot_experts([], received=0)),
    ("fail", checks.overlap(with_(OVERLAP))),
    ("pass", checks.overlap(with_(OVERLAP, asynchronous_ns=10))),
    ("pass", checks.overlap(with_(OVERLAP, exchange_ns=5))),
    ("unknown", checks.overlap(with_(OVERLAP, exchange_ns=0))),
    ("pass", checks.forward_modes(with_(MODES))),
    ("fail", checks.forward_modes(with_(MODES, mixed=1))),
    ("unknown", checks.forward_modes(with_(MODES, steps=0, prefill=0, decode=0))),
    ("pass", checks.rollback(with_(ROLLBACK))),
    ("fail", checks.rollback(with_(ROLLBACK, rollback_version=0))),
    ("fail", checks.rollback(with_(ROLLBACK, versions_with_mapping=[2]))),
    ("unknown", checks.rollback(with_(ROLLBACK, newest_version=0, version=0))),
    ("unknown", checks.rollback(with_(ROLLBACK, newest_version=None, version=0, versions_with_mapping=None))),
    ("pass", checks.alert_rules([{"rules": [{"name": "MoeX", "health": "ok"}]}])),
    ("fail", checks.alert_rules([{"rules": [{"name": "Other", "health": "ok"}]}])),
    ("fail", checks.alert_rules([{"rules": [{"name": "MoeX", "health": "err"}]}])),
    ("unknown", checks.alert_rules(None)),
]


@pytest.mark.parametrize(("status", "finding"), CASES, ids=[f"{at}-{c[0]}" for at, c in enumerate(CASES)])
def test_a_line_is_judged_with_its_figure_and_fix(status: str, finding: Finding) -> None:
    """Whatever does not pass says what to do about it, and every line has its figure in words."""
    assert finding.status.value == status
    assert finding.figure
    assert finding.reason
    assert (finding.fix is None) == (finding.status is Status.PASS)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_experts_per_tok": 8, "num_experts": 64}, (8, 64, 0)),
        ({"num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1}, (8, 256, 1)),
        ({"num_experts_per_tok": 4, "num_experts": 60, "shared_expert_intermediate_size": 5632}, (4, 60, 1)),
        ({"text_config": {"num_experts_per_tok": 1, "num_local_experts": 16}}, (1, 16, 0)),
    ],
)
def test_configs_of_models_are_read(tmp_path: Any, config: dict[str, Any], shape: tuple[int, ...]) -> None:
    """The field's names for the same things."""
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = read_model_config(path)
    assert (found.top_k, found.experts, found.shared_experts) == shape


def test_a_config_without_experts_is_refused(tmp_path: Any) -> None:
    """A dense model's config, or another file: the names that were looked for are listed."""
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 1}')
    with pytest.raises(UsageError, match=r"names no experts: one of num_local_experts, .*--top-k"):
        read_model_config(path)


def test_a_silent_rank_may_have_ended_or_never_called_init() -> None:
    """Both are said: what the collector sees is the same."""
    for finding in (checks.coverage(with_(COVERED, ranks=3)), checks.topology(with_(TOPOLOGY, world_size=8))):
        assert "call moetrace.init on every rank" in finding.fix
        assert "see whether they still run" in finding.fix
