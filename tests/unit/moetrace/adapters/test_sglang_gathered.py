"""SGLang's data-parallel attention without an exchange backend, against stand-ins: every rank counts its own.

Names and what they return are those of the wheel of sglang 0.5.23 (read in November 2026): srt/layers/
dp_attention.py, srt/layers/moe/utils.py, srt/runtime_context.py, srt/model_executor/{forward_context,
forward_batch_info}.py. What is shown: ranks run one after the other with the rows that all of them gather,
and what they count together is what was asked for, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from frameworks.checks import Traced, Truth, check, counts_of, trace
from frameworks.sglang_stand_ins import EXPERTS, HIDDEN, LAYERS, TOP_K, Model, StandardDispatcher, moved
from moetrace.adapters import sglang_gathered
from moetrace_schemas.enums import CountKind


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """sglang.srt.model_executor.forward_context.ForwardContext."""

    attn_backend: Any
    moe_num_token_non_padded: Callable[[], torch.Tensor | None] | None = None


@dataclass
class ForwardBatch:
    """What sglang.srt.model_executor.forward_batch_info.ForwardBatch says of its tokens."""

    global_num_token_non_padded_cpu: int | None = None
    num_token_non_padded: torch.Tensor | None = None
    attn_tp_sequence_sharded: bool = True

    def moe_num_token_non_padded(self) -> torch.Tensor | None:
        """None: with several data-parallel ranks the gathered rows are no prefix."""
        return None


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Data-parallel ranks of one forward: how many tokens each has, and the sizes of their slots."""

    tokens: list[int]
    sizes: list[int]
    attn_tp_size: int = 1
    attn_cp_size: int = 1
    ep_size: int = 1

    @property
    def ranks(self) -> int:
        """Of the tensor-parallel group."""
        return len(self.sizes) * self.attn_tp_size

    def rows(self) -> torch.Tensor:
        """Hidden states [sum of sizes, H]; what lies in padding is what was there before."""
        return torch.randn(sum(self.sizes), HIDDEN, generator=torch.Generator().manual_seed(3))

    def slot(self, rank: int) -> slice:
        """Rows of the data-parallel rank that `rank` belongs to."""
        first = sum(self.sizes[: rank // self.attn_tp_size])
        return slice(first, first + self.sizes[rank // self.attn_tp_size])

    def install(self, monkeypatch: pytest.MonkeyPatch, rank: int, batch: ForwardBatch | None) -> None:
        """What the engine says on one rank."""
        context = ForwardContext(None, batch.moe_num_token_non_padded) if batch else None
        parallel = SimpleNamespace(
            attn_tp_rank=rank % self.attn_tp_size,
            attn_tp_size=self.attn_tp_size,
            attn_cp_size=self.attn_cp_size,
        )
        said: dict[str, dict[str, Any]] = {
            "layers.moe.utils": {
                "get_moe_a2a_backend": lambda: SimpleNamespace(is_none=lambda: True),
                "should_use_flashinfer_cutlass_moe_fp4_allgather": lambda: False,
                "is_moe_input_scattered_across_dp_ranks": lambda: False,
            },
            "layers.dp_attention": {
                "is_dp_attention_enabled": lambda: True,
                "get_dp_global_num_tokens": lambda: self.sizes,
                "dp_slot_in": lambda per_rank: 0 if len(per_rank) == 1 else rank // self.attn_tp_size,
            },
            "runtime_context": {"get_parallel": lambda: parallel},
            "model_executor.forward_context": {
                "has_forward_context": lambda: context is not None,
                "get_forward_context": lambda: context,
            },
            "model_executor.forward_batch_info": {"enable_num_token_non_padded": lambda: self.ep_size > 1},
        }
        monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
        for name, names in said.items():
            module = ModuleType(f"sglang.srt.{name}")
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        rank: int,
        batch: ForwardBatch | None,
        places: Any = None,
        rows: torch.Tensor | None = None,
    ) -> tuple[Traced, dict[int, torch.Tensor]]:
        """Traced steps of a rank, and the ids [rows, K] that each layer chose by the test's own means."""
        self.install(monkeypatch, rank, batch)
        model, hidden = Model(StandardDispatcher, self.ep_size, places), self.rows() if rows is None else rows
        ids: dict[int, torch.Tensor] = {}
        for layer, block in zip(LAYERS, model.layers, strict=True):

            def look(_: Any, args: Any, layer: int = layer) -> None:
                ids[layer] = args[1].topk(TOP_K).indices

            block.topk.register_forward_pre_hook(look)
        traced = trace(model, lambda: [model(hidden).detach()])
        check(traced, Truth(), None, kinds=())
        return traced, ids


def expected(ids: torch.Tensor) -> list[int]:
    """Pairs per expert."""
    return [int((ids == expert).sum()) for expert in range(EXPERTS)]


LONGEST = Gathering(tokens=[3, 0, 2], sizes=[3, 3, 3])
"""Every slot as long as the longest; the second rank is idle."""
SUM = Gathering(tokens=[3, 0, 2], sizes=[3, 0, 2])
"""Slots as long as they must be: an idle rank has none."""
ALIGNED = Gathering(tokens=[3, 0, 1], sizes=[4, 0, 2], attn_tp_size=2)
"""Aligned to the two ranks of each attention's tensor-parallel group."""
BUCKET = Gathering(tokens=[3, 0], sizes=[8, 8], ep_size=2)
"""As long as a captured graph is."""


@pytest.mark.parametrize("gathering", [LONGEST, SUM, ALIGNED, BUCKET])
def test_each_rank_counts_its_own_tokens_of_those_that_all_route(
    monkeypatch: pytest.MonkeyPatch, gathering: Gathering
) -> None:
    """Together every token counts once and every row of padding once, apart; idle ranks have padding only."""
    width = gathering.attn_tp_size
    for rank in range(gathering.ranks):
        tokens, slot = gathering.tokens[rank // width], gathering.slot(rank)
        traced, ids = gathering.run(monkeypatch, rank, ForwardBatch(tokens))
        for record in traced.records:
            for layer in LAYERS:
                if rank % width:
                    assert layer not in counts_of(record)
                    continue
                own = ids[layer][slot]
                assert counts_of(record)[layer] == expected(own[:tokens])
                padded = expected(own[tokens:])
                assert counts_of(record, CountKind.PADDING).get(layer, [0] * EXPERTS) == padded
        assert all("each rank counts its own" in str(layer.notes) for layer in traced.report.layers)


def test_experts_receive_the_rows_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding among them: it is computed like any other."""
    for rank in range(2):
        traced, ids = BUCKET.run(monkeypatch, rank, ForwardBatch(BUCKET.tokens[rank]))
        # The stand-in's model always holds the last share of experts.
        here = [0] * (EXPERTS // 2) + expected(ids[LAYERS[0]])[EXPERTS // 2 :]
        assert counts_of(traced.records[0], CountKind.RECEIVED)[LAYERS[0]] == here


@pytest.mark.parametrize("sharded", [False, True])
def test_a_captured_graph_takes_the_number_of_tokens_from_the_device(
    monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """The host's is that of the capture. Where the sequence is sharded each rank has a number of its own."""
    monkeypatch.setattr(sglang_gathered, "_is_capturing", lambda ids: True)
    gathering = Gathering(tokens=[5, 1], sizes=[6, 6], attn_tp_size=2, ep_size=2)
    piece = 6 // 2
    for rank in range(gathering.ranks):
        tokens, slot, at = gathering.tokens[rank // 2], gathering.slot(rank), rank % 2
        local = min(max(tokens - piece * at, 0), piece) if sharded else tokens
        batch = ForwardBatch(6, torch.tensor(local, dtype=torch.int32), sharded)
        traced, ids = gathering.run(monkeypatch, rank, batch)
        own = ids[LAYERS[0]][slot]
        if sharded:
            own = own[piece * at : piece * (at + 1)]
        elif at:
            assert LAYERS[0] not in counts_of(traced.records[0])
            continue
        assert counts_of(traced.records[0])[LAYERS[0]] == expected(own[:local])
        assert sum(counts_of(traced.records[0], CountKind.PADDING).get(LAYERS[0], [])) == TOP_K * len(
            own[local:]
        )


def test_a_graph_without_a_number_of_tokens_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding would be taken for tokens; the report says so before."""
    monkeypatch.setattr(sglang_gathered, "_is_capturing", lambda ids: True)
    traced, _ = LONGEST.run(monkeypatch, 0, ForwardBatch(3))
    assert not any(record.experts for record in traced.records)
    assert all("in CUDA graphs not counted" in str(layer.notes) for layer in traced.report.layers)


def test_replicas_of_own_tokens_count_as_physical_and_as_logical(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's map, padding apart."""
    places = moved(monkeypatch, 1)
    traced, ids = LONGEST.run(monkeypatch, 2, ForwardBatch(2), places)
    own = ids[LAYERS[0]][LONGEST.slot(2)][:2]
    physical = places.logical_to_all_physical_map[0][own, 0]
    assert counts_of(traced.records[0])[LAYERS[0]] == expected(own)
    assert (
        counts_of(traced.records[0], CountKind.PHYSICAL)[LAYERS[0]]
        == torch.bincount(physical.reshape(-1), minlength=6).tolist()
    )


@pytest.mark.parametrize("case", ["no forward of the engine", "rows of another forward"])
def test_rows_of_which_the_engine_says_nothing_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """A call from outside its forward, or with other rows than it gathered: missing, which is said once."""
    sglang_gathered._say_unknown.cache_clear()
    outside = case.startswith("no")
    traced, _ = SUM.run(
        monkeypatch, 0, None if outside else ForwardBatch(3), rows=None if outside else torch.randn(9, HIDDEN)
    )
    assert not any(record.experts for record in traced.records)
    assert caplog.text.count("does not say whose they are") == 1


def test_a_version_or_layout_that_does_not_tell_ranks_apart_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report says why, on every rank."""
    mixed = Gathering(tokens=[3, 2], sizes=[3, 2], attn_cp_size=2)
    traced, _ = mixed.run(monkeypatch, 0, ForwardBatch(3))
    assert not any(record.experts for record in traced.records)
    assert all("context parallelism" in str(layer.notes) for layer in traced.report.layers)
    real = Gathering.install

    def older(self: Gathering, patch: pytest.MonkeyPatch, rank: int, batch: ForwardBatch | None) -> None:
        real(self, patch, rank, batch)
        del sys.modules["sglang.srt.layers.dp_attention"].dp_slot_in  # type: ignore[attr-defined]

    monkeypatch.setattr(Gathering, "install", older)
    traced, _ = SUM.run(monkeypatch, 0, ForwardBatch(3))
    assert not any(record.experts for record in traced.records)
    assert all("does not say which are whose" in str(layer.notes) for layer in traced.report.layers)
    assert not any(layer.counted for layer in traced.report.layers)
