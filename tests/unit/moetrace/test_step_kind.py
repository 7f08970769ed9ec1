"""What a step is for, where nobody says it: by the model's own call, by the engine around it, by a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compiled_models import needs_marks
from moetrace.adapters.base import EngineCall, StepFacts
from moetrace.adapters.reference import ReferenceMoE
from moetrace.instrument.counted import counted
from moetrace.instrument.patches import Patches
from moetrace.instrument.step_kind import engine_step
from moetrace.record.count_sites import CountSite
from moetrace.record.types import StepRecord
from moetrace_schemas.enums import CountKind, ForwardMode, Phase, RoutingViolation

from .conftest import Recording

Make = Callable[..., Recording]
DECODE, PREFILL, TRAIN, MIXED = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TRAIN, ForwardMode.MIXED


class Model(nn.Module):
    """An embedding and one MoE layer, called as language models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.moe = ReferenceMoE(hidden=8, width=8, num_experts=4, top_k=2)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        """Hidden states."""
        hidden: torch.Tensor = self.moe(self.embed(input_ids).reshape(-1, 8))
        return hidden


PROMPT, TOKEN = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)


def recorded(record: Make, body: Callable[[Model, Recording], object], **settings: Any) -> list[StepRecord]:
    """Records of what `body` does with an instrumented model in evaluation mode."""
    recording, model = record(**settings), Model().eval()
    recording.tracer.instrument(model)
    body(model, recording)
    records = recording.records()
    assert recording.tracer.guard.errors == {}
    return records


def modes(record: Make, body: Callable[[Model, Recording], object], **settings: Any) -> list[ForwardMode]:
    """Forward modes of those."""
    return [each.forward_mode for each in recorded(record, body, **settings)]


@pytest.mark.parametrize(
    ("training", "gradients", "expected"),
    [(True, True, TRAIN), (True, False, PREFILL), (False, True, PREFILL), (False, False, PREFILL)],
)
def test_training_is_a_module_that_trains_with_gradients(
    record: Make, training: bool, gradients: bool, expected: ForwardMode
) -> None:
    """Both are needed: a forward of evaluation was called `train` for long."""

    def body(model: Model, _: Recording) -> None:
        with torch.set_grad_enabled(gradients):
            model.train(training)(PROMPT)

    assert modes(record, body) == [expected]


def test_one_token_beside_a_cache_is_a_decode(record: Make) -> None:
    """By shape and by the cache; a prompt with an empty cache is a prefill."""

    def body(model: Model, _: Recording) -> None:
        model(PROMPT, past_key_values=object())
        model(TOKEN, past_key_values=object())
        model(input_ids=TOKEN, past_key_values=object())
        model(TOKEN)

    assert modes(record, body) == [PREFILL, DECODE, DECODE, PREFILL]


class Translator(Model):
    """Called as a model of an encoder and a decoder."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the decoder."""
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.embed(decoder_input_ids)
        hidden: torch.Tensor = self.moe(decoder_inputs_embeds.reshape(-1, 8))
        return hidden


def test_a_decoder_beside_an_encoder_is_looked_at(record: Make) -> None:
    """Whatever the encoder was given, the tokens that run now are the decoder's."""
    recording, model = record(), Translator().eval()
    recording.tracer.instrument(model)
    model(input_ids=PROMPT, decoder_input_ids=TOKEN, past_key_values=object())
    model(input_ids=PROMPT, decoder_inputs_embeds=torch.zeros(2, 1, 8), past_key_values=object())
    model(input_ids=TOKEN, decoder_input_ids=PROMPT, past_key_values=object())
    assert [each.forward_mode for each in recording.records()] == [DECODE, DECODE, PREFILL]


class Renamed(Model):
    """Called as models of transformers 5 and models with states of their own are."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, cache: Any = None, cache_params: Any = None
    ) -> torch.Tensor:
        """Hidden states."""
        return super().forward(input_ids)


@pytest.mark.parametrize("name", ["cache", "cache_params"])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=needs_marks)], ids=["plain", "compiled"]
)
def test_a_cache_by_another_name_is_one(record: Make, name: str, compiled: bool) -> None:
    """In plain and in compiled calls."""
    recording, model = record(), Renamed().eval()
    recording.tracer.instrument(model)
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    run(PROMPT, **{name: {"keys": torch.zeros(1)}})
    run(TOKEN, **{name: {"keys": torch.zeros(1)}})
    run(TOKEN)
    torch._dynamo.reset()
    assert [each.forward_mode for each in recording.records()] == [PREFILL, DECODE, PREFILL]


def test_packed_tokens_may_be_of_both(record: Make) -> None:
    """Nothing tells prompts from answers there; of a module that trains it is training."""

    def body(model: Model, _: Recording) -> None:
        model(PROMPT.reshape(-1))
        model.train()(PROMPT.reshape(-1))

    assert modes(record, body) == [MIXED, TRAIN]


@needs_marks
def test_a_compiled_call_says_the_same(record: Make) -> None:
    """Decode, prefill, packed and training, in steps of its own and in one that is open."""

    def body(model: Model, recording: Recording) -> None:
        run = torch.compile(model, backend="eager", fullgraph=True)
        cache = {"keys": torch.zeros(1)}
        run(PROMPT, past_key_values=cache)
        run(TOKEN, past_key_values=cache)
        run(input_ids=TOKEN, past_key_values=cache)
        run(PROMPT.reshape(-1))
        with recording.tracer.step():
            run(TOKEN, past_key_values=cache)
        model.train()
        run(PROMPT)

    torch._dynamo.reset()
    assert modes(record, body) == [PREFILL, DECODE, DECODE, MIXED, DECODE, TRAIN]
    torch._dynamo.reset()


def test_a_step_of_several_forwards_is_what_they_are_together(record: Make) -> None:
    """Generation in one step is mixed; an evaluation inside a training step does not change it."""

    def body(model: Model, recording: Recording) -> None:
        with recording.tracer.step():
            model(PROMPT)
            model(TOKEN, past_key_values=object())
        with recording.tracer.step():
            model.train()(PROMPT)
            model.eval()(PROMPT)

    assert modes(record, body) == [MIXED, TRAIN]


def test_what_was_said_stays(record: Make) -> None:
    """The caller's word is above the configuration, and that above the model's call."""

    def body(model: Model, recording: Recording) -> None:
        with recording.tracer.step(forward_mode="mixed"):
            model(PROMPT)
        model(PROMPT)

    assert modes(record, body, forward_mode="decode") == [MIXED, DECODE]


def test_hand_written_code_is_training_where_gradients_are_on(record: Make) -> None:
    """No module says it; what is known is whether the step begins with gradients."""
    recording = record()
    router = recording.tracer.wrap(router=lambda: None, layer=0).router
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), recording.tracer.step():
            router()
    assert [each.forward_mode for each in recording.records()] == [TRAIN, PREFILL]


class Engine:
    """Runs a model as a serving engine does."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, facts: StepFacts | None, forwards: int = 1) -> None:
        """Some forwards of one batch."""
        for _ in range(forwards):
            self.model(PROMPT)

    def around(self, outer: StepFacts, inner: StepFacts) -> None:
        """A call that makes the other one."""
        self.run(inner)


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts | None:
    facts: StepFacts | None = args[1]
    return facts


def _hooked(recording: Recording, model: Model) -> tuple[Engine, Patches]:
    patches, engine = Patches(), Engine(model)
    for name in ("run", "around"):
        call = EngineCall(owner=Engine, attribute=name, read=_read)
        patches.replace(Engine, name, lambda current, call=call: engine_step(current, recording.tracer, call))
    return engine, patches


def test_an_engine_says_what_its_batches_are(record: Make) -> None:
    """One step per batch, whatever it calls; dummy batches are no load, warm-up is marked; a call inside a
    call is part of the outer one; a call of which nothing is known changes nothing.
    """

    def body(model: Model, recording: Recording) -> None:
        engine, patches = _hooked(recording, model)
        engine.run(StepFacts(forward_mode=DECODE), forwards=2)
        engine.run(StepFacts(forward_mode=MIXED))
        engine.run(StepFacts(dummy=True, warmup=True))
        engine.around(StepFacts(forward_mode=DECODE, dummy=True), StepFacts(dummy=True, warmup=True))
        engine.around(StepFacts(dummy=True, warmup=True, is_step=False), StepFacts())
        engine.run(None)
        with recording.tracer.step():
            engine.run(StepFacts(forward_mode=DECODE))
        patches.restore()
        engine.run(StepFacts(forward_mode=DECODE))

    records = recorded(record, body, warmup_steps=0)
    assert [each.forward_mode for each in records] == [
        DECODE, MIXED, PREFILL, DECODE, PREFILL, PREFILL, DECODE, PREFILL,
    ]  # fmt: skip
    assert [each.warmup for each in records] == [False, False, True, False, True, False, False, False]
    assert [{row.kind for row in each.experts} for each in records] == [
        {CountKind.ROUTED}, {CountKind.ROUTED}, {CountKind.DUMMY}, {CountKind.DUMMY}, {CountKind.DUMMY},
        {CountKind.ROUTED}, {CountKind.ROUTED}, {CountKind.ROUTED},
    ]  # fmt: skip
    routed = [sum(row.counts) for each in records for row in each.experts]
    assert routed == [40, 20, 20, 20, 20, 20, 20, 20]


def test_a_batch_of_which_the_engine_knows_nothing_is_either(record: Make) -> None:
    """A replay of a graph calls no model that could say it."""

    def body(_: Model, recording: Recording) -> None:
        call = EngineCall(owner=0, attribute="", read=lambda args, kwargs: StepFacts())
        engine_step(lambda: None, recording.tracer, call)()

    assert modes(record, body) == [MIXED]


def test_a_dummy_batch_in_an_open_step_is_no_load(record: Make) -> None:
    """Warm-up marks the step; pairs of the dummy call are left out, and those of the others are there."""

    def body(model: Model, recording: Recording) -> None:
        engine, patches = _hooked(recording, model)
        with recording.tracer.step():
            engine.run(StepFacts(dummy=True, warmup=True, is_step=False))
            engine.run(StepFacts(forward_mode=DECODE))
        patches.restore()

    (step,) = recorded(record, body, warmup_steps=0)
    assert step.warmup
    assert [(row.kind, sum(row.counts)) for row in step.experts] == [(CountKind.ROUTED, 20)]


def test_a_dummy_batch_in_an_open_step_adds_what_experts_received(record: Make) -> None:
    """Rows of others are work; nothing that was sent or executed is held against what a part of it routed.

    Layer 0 is on one rank, where what is routed is executed; layer 1 on two, where it is sent. A step without
    a dummy batch, behind one with it, is judged as ever.
    """
    recording = record(warmup_steps=0, check_steps=1)
    tracer = recording.tracer
    sites = [
        CountSite(0, 4),
        CountSite(0, 4, CountKind.EXECUTED),
        CountSite(1, 4, ep_size=2),
        CountSite(1, 4, CountKind.RECEIVED),
    ]
    tracer.set_count_sites(sites, torch.device("cpu"))
    ids = torch.tensor([[0, 1], [2, 3]])
    calls = [
        counted(lambda: ids, tracer, lambda counter, at, *_: counter.add(at, ids), at)
        for at in range(len(sites))
    ]

    def run(rows: list[int]) -> None:
        for call in calls:
            call()
        assert tracer.buffer is not None
        tracer.buffer.traffic.append((1, Phase.DISPATCH, 16, rows))

    def batch(facts: StepFacts, rows: list[int]) -> None:
        call = EngineCall(owner=0, attribute="", read=lambda args, kwargs: facts)
        engine_step(lambda: run(rows), tracer, call)()

    real, astray, dummy = (False, [2, 2]), (False, [4, 0]), (True, [4, 0])
    for batches in ((real, dummy), (dummy, real), (dummy,), (real,), (astray,)):
        with tracer.step():
            for is_dummy, rows in batches:
                batch(StepFacts(forward_mode=DECODE, dummy=is_dummy), rows)
    records = recording.records()
    assert tracer.guard.errors == {}
    routed_0, routed_1 = (0, CountKind.ROUTED), (1, CountKind.ROUTED)
    received = (1, CountKind.RECEIVED)
    assert [{(row.layer, row.kind): sum(row.counts) for row in each.experts} for each in records] == [
        {routed_0: 4, routed_1: 4, received: 8},
        {routed_0: 4, routed_1: 4, received: 8},
        {received: 4},
        {routed_0: 4, routed_1: 4, received: 4},
        {routed_0: 4, routed_1: 4, received: 4},
    ]
    assert [[(row.layer, row.violation, row.count) for row in each.violations] for each in records] == [
        [],
        [],
        [],
        [],
        [(1, RoutingViolation.TRAFFIC_MISMATCH, 4)],
    ]


def test_an_engine_whose_facts_cannot_be_read_runs_on(record: Make) -> None:
    """A fault of ours is counted; the engine's own fault passes, and the step ends."""
    recording, model = record(), Model().eval()
    recording.tracer.instrument(model)

    def unreadable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts | None:
        raise KeyError("another version")

    def broken(*args: Any) -> None:
        raise ValueError("the engine's own")

    run = engine_step(
        lambda: model(PROMPT), recording.tracer, EngineCall(owner=0, attribute="", read=unreadable)
    )
    assert run().shape == (10, 8)
    assert recording.tracer.guard.errors == {"engine": 1}
    call = EngineCall(owner=0, attribute="", read=lambda args, kwargs: StepFacts(forward_mode=DECODE))
    with pytest.raises(ValueError, match="the engine's own"):
        engine_step(broken, recording.tracer, call)()
    assert recording.tracer.kind.facts is None
    assert recording.tracer.open_scopes == 0
