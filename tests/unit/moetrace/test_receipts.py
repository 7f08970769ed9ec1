"""Routing receipts: each contradiction, made in a real model, is counted under its own reason only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn

from moetrace.adapters.reference import ReferenceMoE
from moetrace.emit.prometheus import PrometheusEmitter
from moetrace.emit.wire import span_attributes
from moetrace.record.count_sites import CountSite
from moetrace.record.expert_homes import UNKNOWN, homes_of
from moetrace.record.receipts import receipts, settle
from moetrace.record.types import ExpertRow, TrafficRecord, ViolationRow
from moetrace_schemas import attributes
from moetrace_schemas.columns import VIOLATIONS, unpack
from moetrace_schemas.enums import CountIds, CountKind, Phase, RoutingViolation
from moetrace_schemas.placement import PlacementMap, PlacementTerms
from transformers_there import transformers_or_skip

from .conftest import Recording
from .records import CONTEXT, step_record

Make = Callable[..., Recording]
EXPERTS, TOP_K = 4, 2
TOKENS = torch.randint(0, 64, (2, 4), generator=torch.Generator().manual_seed(0))


def qwen(*, normalised: bool = True) -> Any:
    """A tiny Qwen3 MoE with random weights, one layer; its experts skip ids that are no expert."""
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        decoder_sparse_step=1,
        norm_topk_prob=normalised,
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def reroute(model: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Let the router return changed (weights, ids)."""
    gate = model.model.layers[0].mlp.gate
    plain = gate.forward

    def forward(hidden: torch.Tensor) -> tuple[Any, Any, Any]:
        logits, weights, ids = plain(hidden)
        return (logits, *change(weights.clone(), ids.clone()))

    gate.forward = forward


def misuse(model: Any, change: Callable[[Any], Any]) -> None:
    """Let the experts be called with changed ids, behind the router's back."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, ids, weights = args
        return hidden, change(ids.clone()), weights

    model.model.layers[0].mlp.experts.register_forward_pre_hook(hook)


def violations(record: Make, model: Any, **arguments: Any) -> dict[RoutingViolation, int]:
    """What one recorded step of a model counts."""
    recording = record()
    recording.tracer.instrument(model, strict=True)
    with torch.no_grad():
        model(input_ids=TOKENS, **arguments)
    (step,) = recording.records()
    assert recording.tracer.guard.errors == {}
    found = {row.violation: row.count for row in step.violations}
    assert dict(recording.tracer.metrics.violations) == found
    return found


@pytest.mark.parametrize("normalised", [True, False])
def test_a_sound_model_contradicts_nothing(record: Make, normalised: bool) -> None:
    """With padding too, and whatever its weights add up to where it does not normalise them."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    assert violations(record, qwen(normalised=normalised), attention_mask=mask) == {}


def test_an_id_that_is_no_expert(record: Make) -> None:
    """One pair of sixteen."""

    def change(weights: Any, ids: Any) -> tuple[Any, Any]:
        ids[0, 0] = EXPERTS
        return weights, ids

    model = qwen()
    reroute(model, change)
    assert violations(record, model) == {RoutingViolation.ID_OUT_OF_RANGE: 1}


def test_one_expert_twice_in_a_token(record: Make) -> None:
    """Two tokens hold the same expert in both slots."""

    def change(weights: Any, ids: Any) -> tuple[Any, Any]:
        ids[:2, 1] = ids[:2, 0]
        return weights, ids

    model = qwen()
    reroute(model, change)
    assert violations(record, model) == {RoutingViolation.DUPLICATE_EXPERT: 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number(record: Make, value: float) -> None:
    """A sum with it is no sum, and is not complained about as well."""

    def change(weights: Any, ids: Any) -> tuple[Any, Any]:
        weights[3, 1] = value
        return weights, ids

    model = qwen()
    reroute(model, change)
    assert violations(record, model) == {RoutingViolation.WEIGHT_NOT_FINITE: 1}


def test_weights_that_do_not_add_up_to_what_the_model_says(record: Make) -> None:
    """Three tokens of eight are off by a tenth; a model that does not normalise may be."""

    def change(weights: Any, ids: Any) -> tuple[Any, Any]:
        weights[:3] *= 1.1
        return weights, ids

    model = qwen()
    reroute(model, change)
    assert violations(record, model) == {RoutingViolation.WEIGHT_NOT_NORMALISED: 3}
    free = qwen(normalised=False)
    reroute(free, change)
    assert violations(record, free) == {}


def test_pairs_that_vanish_between_router_and_experts(record: Make) -> None:
    """Nobody said that they were dropped: the experts were called with fewer."""

    def change(ids: Any) -> Any:
        ids[:3, 0] = EXPERTS
        return ids

    model = qwen()
    misuse(model, change)
    assert violations(record, model) == {RoutingViolation.CONSERVATION: 3}


def test_experts_that_compute_what_nobody_sent_them(record: Make) -> None:
    """All rows go to expert 0; in sum as many as were chosen, so nothing is lost."""
    model = qwen()
    misuse(model, torch.zeros_like)
    found = violations(record, model)
    assert list(found) == [RoutingViolation.EXECUTED_NOT_SELECTED]
    assert found[RoutingViolation.EXECUTED_NOT_SELECTED] > 0


def test_a_weight_of_a_padding_token_may_be_anything(record: Make) -> None:
    """A fully masked row makes NaN in more than one model, and nobody reads it."""

    def change(weights: Any, ids: Any) -> tuple[Any, Any]:
        weights[3], ids[3, 1] = float("nan"), ids[3, 0]
        return weights, ids

    model = qwen()
    reroute(model, change)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert violations(record, model, attention_mask=mask) == {}


def test_only_checked_steps_are_looked_at(record: Make) -> None:
    """The first recorded step and every n-th; the others cost nothing more, and show what counts show."""

    def change(weights: Any, ids: Any) -> tuple[Any, Any]:
        ids[0, 1] = ids[0, 0]
        return weights, ids

    recording, model = record(check_steps=3), qwen()
    reroute(model, change)
    recording.tracer.instrument(model)
    for _ in range(7):
        model(input_ids=TOKENS)
    steps = recording.records()
    assert [bool(step.violations) for step in steps] == [True, False, False, True, False, False, True]


def test_never_means_never(record: Make) -> None:
    """`check_steps=0` switches the checks off."""
    recording, model = record(check_steps=0), qwen()
    reroute(model, lambda weights, ids: (weights * 3, ids))
    recording.tracer.instrument(model)
    model(input_ids=TOKENS)
    (step,) = recording.records()
    assert step.violations == ()


def test_executed_is_sent_only_where_it_says_more(record: Make) -> None:
    """A sound step carries no row of that kind; an unsound one shows what was computed."""
    for unsound in (False, True):
        recording, model = record(), qwen()
        if unsound:
            misuse(model, torch.zeros_like)
        recording.tracer.instrument(model)
        model(input_ids=TOKENS)
        (step,) = recording.records()
        rows = [row.counts for row in step.experts if row.kind is CountKind.EXECUTED]
        assert rows == ([(16, 0, 0, 0)] if unsound else [])


def test_the_reference_layer_is_checked_at_its_experts(record: Make) -> None:
    """Rows that its experts computed are those that its router chose."""
    torch.manual_seed(0)
    recording, model = record(), ReferenceMoE(8, 16, num_experts=4, top_k=2)
    recording.tracer.instrument(model)
    model(torch.randn(6, 8))
    (step,) = recording.records()
    assert step.violations == ()
    assert [row.kind for row in step.experts] == [CountKind.ROUTED]


def test_recompute_is_checked_once(record: Make) -> None:
    """A forward that runs again in backward neither doubles a violation nor the rows executed."""
    from torch.utils import checkpoint

    torch.manual_seed(0)
    layer = ReferenceMoE(8, 16, num_experts=4, top_k=2)
    plain = layer.route

    def route(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = plain(tokens)
        return weights * 2, ids

    layer.route = route
    recording = record()
    recording.tracer.instrument(layer)
    with recording.tracer.step():
        hidden = torch.randn(5, 8, requires_grad=True)
        checkpoint.checkpoint(layer, hidden, use_reentrant=False).sum().backward()
    (step,) = recording.records()
    assert {row.violation: row.count for row in step.violations} == {
        RoutingViolation.WEIGHT_NOT_NORMALISED: 5
    }


# --- without a model -----------------------------------------------------------------------------

ROUTED = ExpertRow(layer=3, kind=CountKind.ROUTED, counts=(3, 0, 4, 1))
SITE = CountSite(3, 4)


def reasons(*rows: ExpertRow, site: CountSite = SITE, **more: Any) -> dict[RoutingViolation, int]:
    """Violations of one layer."""
    settled = settle(rows, [site], **more)
    assert {row.layer for row in settled.violations} <= {3}
    return {row.violation: row.count for row in settled.violations}


def test_what_was_dropped_and_what_was_admitted_are_what_was_selected() -> None:
    """A receipt states all three; more admitted than selected cannot be."""
    dropped = ExpertRow(layer=3, kind=CountKind.DROPPED, counts=(1, 2, 0, 0))
    (receipt,) = receipts([ROUTED, dropped])
    assert (receipt.selected, receipt.admitted, receipt.dropped) == ((4, 2, 4, 1), (3, 0, 4, 1), (1, 2, 0, 0))
    assert reasons(ROUTED, dropped) == {}
    below = ExpertRow(layer=3, kind=CountKind.DROPPED, counts=(-1, 0, 0, 0))
    settled = settle([ROUTED, below], [SITE])
    assert settled.violations == (ViolationRow(layer=3, violation=RoutingViolation.CONSERVATION, count=1),)
    assert settled.experts[1].counts == (0, 0, 0, 0)


def test_a_dummy_batch_is_one_total_beside_what_experts_did_for_others() -> None:
    """Pairs that are sent, padding with them, dropped and invalid ones not; no contradiction is looked for.

    What experts computed is told where it is not what they received, as in any step.
    """
    executed = ExpertRow(layer=3, kind=CountKind.EXECUTED, counts=(0, 0, 6, 3))
    rows = (
        ROUTED,
        ExpertRow(layer=3, kind=CountKind.PADDING, counts=(0, 2, 0, 0)),
        ExpertRow(layer=3, kind=CountKind.DROPPED, counts=(1, 0, 0, 0)),
        ExpertRow(layer=3, kind=CountKind.INVALID, counts=(5,)),
        ExpertRow(layer=3, kind=CountKind.PHYSICAL, counts=(3, 0, 2, 1, 2, 0)),
    )
    total = ExpertRow(layer=3, kind=CountKind.DUMMY, counts=(10,))
    seen = [ViolationRow(layer=3, violation=RoutingViolation.DUPLICATE_EXPERT, count=1)]
    received = ExpertRow(layer=3, kind=CountKind.RECEIVED, counts=(0, 0, 6, 4))
    settled = settle([*rows, received, executed], [SITE], seen=seen, dummy=True)
    assert settled.experts == (total, received, executed)
    assert settled.violations == ()
    same = ExpertRow(layer=3, kind=CountKind.EXECUTED, counts=received.counts)
    assert settle([*rows, received, same], [SITE], dummy=True).experts == (total, received)


def test_padding_is_admitted_and_executed_like_any_token() -> None:
    """Only load figures leave it out."""
    padding = ExpertRow(layer=3, kind=CountKind.PADDING, counts=(0, 2, 0, 0))
    executed = ExpertRow(layer=3, kind=CountKind.EXECUTED, counts=(3, 2, 4, 1))
    assert reasons(ROUTED, padding, executed) == {}
    assert reasons(ROUTED, executed) == {RoutingViolation.EXECUTED_NOT_SELECTED: 2}


def test_a_framework_whose_ids_may_stand_for_none_is_believed() -> None:
    """-1 marks rows without a token there."""
    invalid = ExpertRow(layer=3, kind=CountKind.INVALID, counts=(5,))
    assert reasons(ROUTED, invalid) == {RoutingViolation.ID_OUT_OF_RANGE: 5}
    assert reasons(ROUTED, invalid, site=CountSite(3, 4, sentinels=True)) == {}


def test_rows_that_went_elsewhere_than_counts_and_placement_say() -> None:
    """Two ranks hold experts 0, 1 and 2, 3: three and five rows are due."""
    site = CountSite(3, 4, ep_size=2)

    def sent(*rows: int) -> tuple[TrafficRecord, ...]:
        return (TrafficRecord(layer=3, phase=Phase.DISPATCH, row_bytes=16, rows=rows),)

    assert reasons(ROUTED, site=site, traffic=sent(3, 5)) == {}
    assert reasons(ROUTED, site=site, traffic=sent(5, 3)) == {RoutingViolation.TRAFFIC_MISMATCH: 4}
    # Padded to a capacity, or placed by a map that is not known here: nothing is said.
    padded = CountSite(3, 4, ep_size=2, exact_rows=False)
    assert reasons(ROUTED, site=padded, traffic=sent(8, 8)) == {}
    assert reasons(ROUTED, site=site, traffic=sent(5, 3), homes=UNKNOWN) == {}
    # Experts 0 and 3 on the first rank, 1 and 2 on the second: four rows each.
    moved = homes_of(PlacementMap(**MAP, physical_to_logical=((0, 3, 1, 2),)), PlacementTerms())
    assert reasons(ROUTED, site=site, traffic=sent(4, 4), homes=moved) == {}
    assert reasons(ROUTED, site=site, traffic=sent(3, 5), homes=moved) == {
        RoutingViolation.TRAFFIC_MISMATCH: 2
    }


MAP: dict[str, Any] = {"layers": (3,), "num_experts": 4, "num_ranks": 2}


@pytest.mark.parametrize(
    ("given", "terms"),
    [
        # Expert 0 twice: either rank may get its rows.
        (PlacementMap(**MAP, physical_to_logical=((0, 1, 2, 3, 0, -1),)), PlacementTerms()),
        (PlacementMap(**{**MAP, "layers": (4,)}, physical_to_logical=((0, 1, 2, 3),)), PlacementTerms()),
        (PlacementMap(**{**MAP, "num_ranks": 4}, physical_to_logical=((0, 1, 2, 3),)), PlacementTerms()),
        (
            PlacementMap(**MAP, physical_to_logical=((0, 1, 2, 3),)),
            PlacementTerms(count_ids=CountIds.PHYSICAL),
        ),
    ],
    ids=["replicas", "another layer", "another group", "counts of slots"],
)
def test_a_map_that_does_not_say_where_rows_go_is_not_held_against_them(
    given: PlacementMap, terms: PlacementTerms
) -> None:
    """No expectation, no contradiction."""
    traffic = (TrafficRecord(layer=3, phase=Phase.DISPATCH, row_bytes=16, rows=(8, 0)),)
    site = CountSite(3, 4, ep_size=2)
    assert reasons(ROUTED, site=site, traffic=traffic, homes=homes_of(given, terms)) == {}


@pytest.mark.parametrize(
    ("placements", "mismatches"),
    [
        ([], 0),
        ([{"version": 2, "physical_to_logical": [[2, 3, 0, 1]]}], 8),
        ([{"version": 2, "physical_to_logical": [[0, 1, 2, 3]]}], 0),
        ([{"version": 2}], 0),
        ([{"version": 2, "physical_to_logical": [[2, 3, 0, 1]]}, {"version": 0}], 0),
    ],
    ids=["none", "moved", "in order", "a version alone", "back to the first"],
)
def test_a_placement_that_was_told_is_what_rows_are_held_against(
    record: Make, placements: list[dict[str, Any]], mismatches: int
) -> None:
    """From `placement()` to the violation: the dispatcher sends by another map than the one in force."""
    recording = record(world_size=2)
    tracer = recording.tracer
    tracer.set_count_sites([CountSite(0, 4, ep_size=2)], torch.device("cpu"))
    for placement in placements:
        terms = {"ranks": 2} if "physical_to_logical" in placement else {}
        tracer.placement(**placement, **terms)
    with tracer.step():
        assert tracer.buffer is not None
        tracer.buffer.counter.add(0, torch.tensor([[0, 1], [0, 1], [2, 0]]))
        tracer.buffer.traffic.append((0, Phase.DISPATCH, 16, [5, 1]))
    (step,) = recording.records()
    found = {row.violation: row.count for row in step.violations}
    assert found == ({RoutingViolation.TRAFFIC_MISMATCH: mismatches} if mismatches else {})


def test_several_ranks_compare_what_ran_with_what_came() -> None:
    """Without the others' routers a rank knows no more."""
    site = CountSite(3, 4, ep_size=2)
    received = ExpertRow(layer=3, kind=CountKind.RECEIVED, counts=(0, 0, 6, 2))
    executed = ExpertRow(layer=3, kind=CountKind.EXECUTED, counts=(0, 0, 5, 2))
    assert reasons(ROUTED, received, executed, site=site) == {RoutingViolation.CONSERVATION: 1}


def test_violations_travel_packed_and_are_exported() -> None:
    """One row per layer and reason on the wire, absent in a sound step."""
    row = ViolationRow(layer=3, violation=RoutingViolation.DUPLICATE_EXPERT, count=9)
    sent = span_attributes(
        step_record(violations=(row,)), CONTEXT, sample_period=1, model_name="", model_version=""
    )
    block = sent[attributes.COLUMNS_VIOLATIONS]
    assert isinstance(block, bytes)
    columns, _ = unpack(VIOLATIONS, block)
    assert {name: list(values) for name, values in columns.items()} == {
        "layer": [3],
        "violation": [1],
        "count": [9],
    }
    sound = span_attributes(step_record(), CONTEXT, sample_period=1, model_name="", model_version="")
    assert attributes.COLUMNS_VIOLATIONS not in sound


def test_violations_of_a_step_are_a_counter_of_the_process(record: Make) -> None:
    """Under the catalogue's name, by reason."""
    registry = CollectorRegistry()
    recording, model = record(), qwen()
    metrics, guard = recording.tracer.metrics, recording.tracer.guard
    recording.tracer.drain.emitters.append(PrometheusEmitter(registry, metrics, guard))
    reroute(model, lambda weights, ids: (weights * 3, ids))
    recording.tracer.instrument(model)
    model(input_ids=TOKENS)
    recording.emitter.wait_for(1)
    line = 'moetrace_self_routing_violations_total{reason="weight_not_normalised"} 8.0'
    assert line in generate_latest(registry).decode()
