"""Counts per expert equal what the router chose, and what does not count is counted apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import checkpoint

from moetrace.adapters.reference import ReferenceMoE
from moetrace.instrument.routing import CountSite, StepCounter, find_expert_ids, padding_flags
from moetrace.instrument.steps import note_padding
from moetrace_schemas.enums import CountKind
from transformers_there import transformers_or_skip

from .conftest import Recording

Make = Callable[..., Recording]
CPU = torch.device("cpu")


def counter(num_experts: int = 4, **site: int) -> StepCounter:
    """A counter of one layer."""
    return StepCounter([CountSite(2, num_experts, **site)], CPU)  # type: ignore[arg-type]


def counts(step: StepCounter) -> dict[CountKind, tuple[int, ...]]:
    """Its rows by kind."""
    rows = step.rows()
    assert {row.layer for row in rows} <= {2}
    return {row.kind: row.counts for row in rows}


def expected(ids: torch.Tensor, real: Sequence[bool], num_experts: int) -> dict[CountKind, tuple[int, ...]]:
    """The specification: plain bincount over real and padding tokens apart."""
    keep = torch.tensor(list(real), dtype=torch.bool)
    valid = (ids >= 0) & (ids < num_experts)

    def bins(mask: torch.Tensor) -> tuple[int, ...]:
        return tuple(torch.bincount(ids[mask].flatten(), minlength=num_experts).tolist())

    result = {CountKind.ROUTED: bins(valid & keep.unsqueeze(1))}
    if any(padding := bins(valid & ~keep.unsqueeze(1))):
        result[CountKind.PADDING] = padding
    if invalid := int((~valid).sum()):
        result[CountKind.INVALID] = (invalid,)
    return result


@given(st.data())
def test_counts_equal_a_plain_bincount(data: st.DataObject) -> None:
    """For any ids, valid or not, and any padding: exactly what bincount says, in three kinds."""
    num_experts, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    tokens = data.draw(st.integers(0, 8))
    values = data.draw(
        st.lists(st.integers(-3, num_experts + 2), min_size=tokens * top_k, max_size=tokens * top_k)
    )
    real = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    ids = torch.tensor(values, dtype=dtype).reshape(tokens, top_k)
    step = counter(num_experts)
    step.padding = padding_flags(torch.tensor(real).long().unsqueeze(0))
    step.add(0, ids)
    assert counts(step) == expected(ids.long(), real, num_experts)


def test_ids_beyond_any_range_neither_count_nor_crash() -> None:
    """The largest and smallest integers are invalid like any other id that is no expert."""
    step = counter()
    step.add(0, torch.tensor([[2**63 - 1, -(2**63)], [4, -1], [3, 0]]))
    assert counts(step) == {CountKind.ROUTED: (1, 0, 0, 1), CountKind.INVALID: (4,)}


def test_the_ids_are_left_as_they_are() -> None:
    """Counting never writes into the model's tensor."""
    ids = torch.tensor([[0, 9], [-5, 3]])
    before = ids.clone()
    counter().add(0, ids)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("shape", [(2, 3, 2), (6, 2), (12,)], ids=["B S K", "T K", "T*K"])
def test_ids_of_any_layout_are_counted_with_their_padding(shape: tuple[int, ...]) -> None:
    """Batch and sequence apart, tokens in a row, or the slots of all tokens side by side."""
    ids = torch.tensor([[0, 1], [0, 1], [2, 3], [0, 1], [2, 3], [2, 3]])
    step = counter()
    step.padding = padding_flags(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    step.add(0, ids.reshape(shape))
    assert counts(step) == {CountKind.ROUTED: (3, 3, 0, 0), CountKind.PADDING: (0, 0, 3, 3)}


def test_one_id_per_token_is_counted_with_its_padding() -> None:
    """A top-1 router may leave out the dimension of the slots."""
    step = counter()
    step.padding = padding_flags(torch.tensor([[1, 0]]))
    step.add(0, torch.tensor([3, 3]))
    assert counts(step) == {CountKind.ROUTED: (0, 0, 0, 1), CountKind.PADDING: (0, 0, 0, 1)}


def test_padding_of_another_size_is_not_applied() -> None:
    """Ids of packed tokens do not line up with the mask: better all counted than the wrong ones left out."""
    step = counter()
    step.padding = padding_flags(torch.tensor([[1, 0, 0]]))
    step.add(0, torch.tensor([[0, 1], [2, 3]]))
    assert counts(step) == {CountKind.ROUTED: (1, 1, 1, 1)}


def test_an_empty_batch_counts_zero_and_not_nothing() -> None:
    """A rank without tokens routed zero rows: that is known, not missing."""
    step = counter()
    step.add(0, torch.empty(0, 2, dtype=torch.int64))
    assert counts(step) == {CountKind.ROUTED: (0, 0, 0, 0)}


def test_a_layer_that_nobody_counted_has_no_row() -> None:
    """Missing data looks missing, not zero."""
    step = StepCounter([CountSite(0, 2), CountSite(1, 2)], CPU)
    step.add(1, torch.tensor([[0]]))
    assert [(row.layer, row.counts) for row in step.rows()] == [(1, (1, 0))]


def test_calls_of_one_step_add_up() -> None:
    """Several forwards of a step are one count."""
    step = counter(2)
    for _ in range(3):
        step.add(0, torch.tensor([[0, 1]]))
    assert counts(step) == {CountKind.ROUTED: (3, 3)}


def test_clear_starts_from_zero() -> None:
    """A counter that is used again has nothing of the step before."""
    step = counter(2)
    step.padding = torch.ones(1, dtype=torch.int64)
    step.add(0, torch.tensor([[0, 5]]))
    step.add_recompute(0, torch.tensor([[0, 1]]))
    step.clear()
    assert step.rows() == ()
    step.add(0, torch.tensor([[1, 1]]))
    assert counts(step) == {CountKind.ROUTED: (0, 2)}


def test_received_rows_are_counted_under_their_logical_expert() -> None:
    """Local ids of the second of two ranks are experts 2 and 3 of 4; padding does not apply there."""
    step = StepCounter([CountSite(2, 4, CountKind.RECEIVED, offset=2, num_local_experts=2)], CPU)
    step.padding = torch.ones(3, dtype=torch.int64)
    step.add(0, torch.tensor([[0], [1], [1]]))
    assert counts(step) == {CountKind.RECEIVED: (0, 0, 1, 2)}


def test_a_local_id_of_no_local_expert_is_not_taken_for_another_ranks() -> None:
    """Frameworks mark rows that belong elsewhere by -1 or by the number of local experts."""
    step = StepCounter([CountSite(2, 6, CountKind.RECEIVED, offset=2, num_local_experts=2)], CPU)
    step.add(0, torch.tensor([[0], [-1], [2], [1]]))
    assert counts(step) == {CountKind.RECEIVED: (0, 0, 1, 1, 0, 0)}


def test_a_counter_made_in_inference_mode_counts_outside_of_it() -> None:
    """A model that is instrumented while serving may be trained later."""
    with torch.inference_mode():
        step = counter(2)
        step.add(0, torch.tensor([[0]]))
    step.add(0, torch.tensor([[1]]))
    step.clear()
    step.add(0, torch.tensor([[1]]))
    assert counts(step) == {CountKind.ROUTED: (0, 1)}


def test_ids_on_another_kind_of_device_are_refused_with_the_fix() -> None:
    """A model that was moved after it was instrumented: the log line says what to do."""
    with pytest.raises(ValueError, match=r"chosen on meta, but counted on cpu: move the model first"):
        counter().add(0, torch.zeros(1, 2, dtype=torch.int64, device="meta"))


# --- which tensor holds the ids ------------------------------------------------------------------

WEIGHTS = torch.rand(3, 2)
LOGITS = torch.rand(3, 4)
IDS = torch.tensor([[0, 1], [1, 2], [2, 3]])


@pytest.mark.parametrize(
    "result",
    [
        (LOGITS, WEIGHTS, IDS),
        (IDS, WEIGHTS),
        (WEIGHTS, IDS),
        [LOGITS, IDS],
        (LOGITS, WEIGHTS, IDS, None),
        IDS,
        (IDS.int(), WEIGHTS),
    ],
    ids=["v5", "v4", "reference", "list", "with more", "alone", "int32"],
)
def test_ids_are_found_by_dtype_in_any_order(result: object) -> None:
    """Versions 4 and 5 of transformers return ids and weights in opposite orders, some logits before them."""
    found = find_expert_ids(result)
    assert found is not None
    assert torch.equal(found.long(), IDS)


@pytest.mark.parametrize("result", [LOGITS, (LOGITS, WEIGHTS), None, (torch.tensor(3), WEIGHTS), "ids"])
def test_without_an_integer_tensor_there_are_no_ids(result: object) -> None:
    """Logits only, a scalar or something else: nothing is guessed."""
    assert find_expert_ids(result) is None


# --- padding -------------------------------------------------------------------------------------


def noted(*args: object, mask_at: int = 1, **kwargs: object) -> list[int] | None:
    """Padding flags that a forward with these arguments leaves."""
    holder = SimpleNamespace(padding=torch.ones(1))
    note_padding(holder, args, kwargs, mask_at)
    return None if holder.padding is None else holder.padding.tolist()


TOKENS = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask", "flags"),
    [
        ([[1, 1, 0], [1, 0, 0]], [0, 0, 1, 0, 1, 1]),
        ([[0, 1, 1], [0, 0, 1]], [1, 0, 0, 1, 1, 0]),
        ([[0, 0, 0], [1, 1, 1]], [1, 1, 1, 0, 0, 0]),
    ],
    ids=["right", "left", "idle row"],
)
def test_padding_is_read_from_the_mask_wherever_it_lies(mask: list[list[int]], flags: list[int]) -> None:
    """Left, right or a whole row; as keyword or by position; as integers or booleans."""
    tensor = torch.tensor(mask)
    assert noted(input_ids=TOKENS, attention_mask=tensor) == flags
    assert noted(TOKENS, tensor) == flags
    assert noted(TOKENS, attention_mask=tensor.bool()) == flags


def test_with_a_cache_the_mask_covers_the_past_and_only_its_end_runs_now() -> None:
    """Decoding: one token per sequence, a mask as long as all that came before."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    assert noted(input_ids=torch.ones(2, 1, dtype=torch.int64), attention_mask=mask) == [0, 1]


def test_embeddings_may_stand_for_tokens() -> None:
    """Their second dimension says how many tokens run now."""
    mask = torch.tensor([[1, 1, 0, 1]])
    assert noted(inputs_embeds=torch.rand(1, 2, 8), attention_mask=mask, mask_at=-1) == [1, 0]


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 3, 3), object()], ids=["none", "4-D", "object"])
def test_a_mask_that_does_not_say_which_tokens_are_padding_is_no_padding(mask: object) -> None:
    """What the forward before left behind is gone, too."""
    assert noted(input_ids=TOKENS, attention_mask=mask) is None


# --- in a model ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A reference layer under activation checkpointing."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.mlp = ReferenceMoE(8, 16, num_experts=4, top_k=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer, recomputed in backward."""
        result: torch.Tensor = checkpoint.checkpoint(self.mlp, hidden, use_reentrant=self.use_reentrant)
        return result


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recompute_is_counted_apart(record: Make, use_reentrant: bool) -> None:
    """Pairs that checkpointing routes again are no new load; their total is told under its own kind."""
    recording, model = record(), Checkpointed(use_reentrant)
    recording.tracer.instrument(model)
    with recording.tracer.step():
        model(torch.randn(5, 8, requires_grad=True)).sum().backward()
    (step,) = recording.records()
    totals = {row.kind: sum(row.counts) for row in step.experts}
    assert totals == {CountKind.ROUTED: 10, CountKind.RECOMPUTE: 10}
    assert recording.tracer.guard.errors == {}


def test_a_language_models_padding_is_left_out_of_every_layer(record: Make) -> None:
    """Routed and padding pairs of each layer equal those of the router's own choices."""
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, result: chosen.append(result[-1].clone()))
    recording = record()
    recording.tracer.instrument(model)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    model(input_ids=torch.randint(0, 64, (2, 4)), attention_mask=mask)
    (step,) = recording.records()
    for layer, ids in enumerate(chosen):
        actual = {row.kind: row.counts for row in step.experts if row.layer == layer}
        assert actual == expected(ids, mask.bool().flatten().tolist(), 4)
