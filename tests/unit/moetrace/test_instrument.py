"""Models in, wrapped models out, and back: what `instrument` and `uninstrument` promise."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from moetrace.adapters.base import ExpertParallel, LayerMatch
from moetrace.adapters.reference import ReferenceMoE
from moetrace.errors import ConfigError, UnsupportedModelError
from moetrace.instrument import compiled
from moetrace.instrument.layer_counts import layer_counts
from moetrace.instrument.patches import mark_of
from moetrace.record.buffer import StepBuffer
from moetrace.timing.clock import HostClock
from moetrace_schemas.enums import CountKind, Phase
from transformers_there import transformers_or_skip

from .conftest import Recording

Make = Callable[..., Recording]


class Decoder(nn.Module):
    """Two reference MoE layers behind each other, as a model of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": ReferenceMoE(8, 16, num_experts=4, top_k=2)}) for _ in range(2)
        )

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """As a plain model."""
        for layer in self.layers:
            hidden = hidden + layer["mlp"](hidden)
        return hidden


class Dense(nn.Module):
    """No MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As a plain model."""
        return self.linear(hidden)


def olmoe(implementation: str = "grouped_mm") -> Any:
    """A tiny OLMoE with random weights."""
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    model = transformers.OlmoeForCausalLM(config).eval()
    model.set_experts_implementation(implementation)
    return model


def namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """What every module of a model holds."""
    return [dict(vars(module)) for module in model.modules()]


def framework_namespaces() -> dict[str, dict[str, Any]]:
    """The modules and classes of torch and transformers that adapters patch."""
    import importlib

    import transformers

    names: tuple[str, ...] = ("torch.distributed", "torch.distributed._functional_collectives")
    theirs = (
        "transformers.integrations.moe",
        "transformers.distributed.expert_parallel",
        "transformers.distributed.parallel_utils",
    )
    found: dict[str, dict[str, Any]] = {}
    for name in (*names, *(theirs if transformers.is_torch_available() else ())):
        module = importlib.import_module(name)
        found[name] = {key: value for key, value in vars(module).items() if type(value) is FunctionType}
    found["Work"] = dict(vars(torch.distributed.Work))
    return found


@pytest.mark.parametrize("make_model", [Decoder, olmoe], ids=["reference", "transformers"])
def test_uninstrument_restores_the_very_same_callables(
    record: Make, make_model: Callable[[], nn.Module]
) -> None:
    """Instances, classes and modules hold the same objects as before, and no more of them."""
    tracer, model = record().tracer, make_model()
    before, framework = namespaces(model), framework_namespaces()
    assert tracer.instrument(model)
    tracer._installer.functions.hook_collectives()
    assert namespaces(model) != before
    assert framework_namespaces() != framework
    tracer.uninstrument()
    assert namespaces(model) == before
    assert framework_namespaces() == framework


def test_shutdown_restores_every_callable(record: Make) -> None:
    """A tracer that is gone leaves nothing behind."""
    recording, model = record(), Decoder()
    before = namespaces(model)
    recording.tracer.instrument(model)
    recording.tracer.shutdown()
    assert namespaces(model) == before


def test_instrumenting_twice_is_instrumenting_once(record: Make) -> None:
    """The same report comes back, and each call is one interval."""
    recording, model = record(), Decoder()
    first = recording.tracer.instrument(model)
    patched = namespaces(model)
    assert recording.tracer.instrument(model) is first
    assert namespaces(model) == patched
    with recording.tracer.step():
        model(torch.randn(3, 8))
    (step,) = recording.records()
    assert sum(sum(row.counts) for row in step.experts) == 2 * 3 * 2


def test_a_part_of_an_instrumented_model_is_not_wrapped_again(record: Make) -> None:
    """Layers that are wrapped already are skipped, with the reason, and counted once."""
    recording, model = record(), Decoder()
    recording.tracer.instrument(model)
    patched = namespaces(model)
    report = recording.tracer.instrument(model.layers[0])
    assert not report
    assert report.skipped == (("mlp", "already instrumented, as part of another model"),)
    assert namespaces(model) == patched


def test_two_models_at_once_are_independent(record: Make) -> None:
    """Both are recorded; letting one go restores it alone, and shared framework functions with the last."""
    recording = record(clock=HostClock())
    first, second = olmoe(), olmoe()
    before, framework = (namespaces(first), namespaces(second)), framework_namespaces()
    for model in (first, second):
        assert recording.tracer.instrument(model)
    recording.tracer.uninstrument(first)
    assert namespaces(first) == before[0]
    ids = torch.ones(1, 4, dtype=torch.int64)
    second(input_ids=ids)
    recording.tracer.uninstrument(second)
    assert namespaces(second) == before[1]
    assert framework_namespaces() == framework
    (step,) = recording.records()
    assert {row.phase for row in step.phases} >= {Phase.ROUTER, Phase.EXPERT_GEMM}


def test_uninstrumenting_a_model_that_is_not_instrumented_does_nothing(record: Make) -> None:
    """A stranger's model is left alone, and so are ours."""
    recording, model = record(), Decoder()
    recording.tracer.instrument(model)
    patched = namespaces(model)
    recording.tracer.uninstrument(Dense())
    assert namespaces(model) == patched


def test_a_wrapper_that_another_tool_put_over_ours_stays_and_ours_goes_silent(record: Make) -> None:
    """Their patch survives `uninstrument`; the model computes the same; nothing is recorded twice."""
    recording, model = record(), Decoder()
    recording.tracer.instrument(model)
    layer = model.layers[0]["mlp"]
    ours = layer.forward

    @functools.wraps(ours)
    def theirs(hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ours(hidden)
        return result

    layer.forward = theirs
    recording.tracer.uninstrument()
    assert layer.forward is theirs
    hidden = torch.randn(2, 8)
    with recording.tracer.step():
        expected = model(hidden)
    recording.tracer.instrument(model)
    with recording.tracer.step():
        assert torch.equal(model(hidden), expected)
    silent, again = recording.records()
    assert {row.phase for row in silent.phases} <= {Phase.OUTSIDE}
    assert [sum(row.counts) for row in again.experts] == [4, 4]


def test_a_model_without_moe_layers_says_what_was_looked_for(record: Make) -> None:
    """The report is false, names what each adapter looks for, and the model is untouched."""
    model = Dense()
    before = namespaces(model)
    report = record().tracer.instrument(model)
    assert not report
    assert len(report.looked_for) >= 2
    assert "no MoE layer found" in str(report)
    assert namespaces(model) == before


def test_strict_raises_where_no_moe_layer_is_found(record: Make) -> None:
    """The error says the same as the report."""
    with pytest.raises(UnsupportedModelError, match="no MoE layer found"):
        record().tracer.instrument(Dense(), strict=True)


def test_something_that_is_no_model_is_a_configuration_error(record: Make) -> None:
    """The message names what was given and what is expected."""
    with pytest.raises(ConfigError, match=r"instrument\(str\): a torch.nn.Module expected"):
        record().tracer.instrument("model")


def test_a_failure_while_instrumenting_leaves_the_model_as_it_was(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error arrives, and no wrapper is left, on shared functions neither."""
    tracer, model = record().tracer, Decoder()
    before, shared = namespaces(model), torch.distributed.all_to_all_single
    functions = tracer._installer.functions
    hook = functions.wrap_engine

    def hook_all(calls: Any) -> None:
        hook(calls)
        functions.hook_collectives()

    monkeypatch.setattr(functions, "wrap_engine", hook_all)

    def full(*arguments: Any) -> None:
        raise MemoryError("no room for counters")

    monkeypatch.setattr(tracer, "set_count_sites", full)
    with pytest.raises(MemoryError):
        tracer.instrument(model)
    assert namespaces(model) == before
    assert torch.distributed.all_to_all_single is shared


@pytest.mark.parametrize("slots", [0, 6])
def test_what_an_exchange_received_is_of_experts_only_without_replicas(slots: int) -> None:
    """Numbers of an exchange are of slots: with replicas they are no layer's experts in order."""
    match = LayerMatch(
        layer=0,
        path="",
        adapter="",
        num_experts=4,
        num_local_experts=2,
        targets=(),
        phases=(),
        num_physical=slots,
        parallel=ExpertParallel(rank=0, size=2, group=0),
    )
    (received,) = [site for site in layer_counts(match) if site.kind is CountKind.RECEIVED]
    assert received.at_exchange is (slots == 0)


def test_the_report_says_what_is_covered(record: Make) -> None:
    """Layers by the model's own numbers and paths, with their phases."""
    report = record().tracer.instrument(Decoder())
    assert [(layer.layer, layer.path) for layer in report.layers] == [
        (0, "layers.0.mlp"),
        (1, "layers.1.mlp"),
    ]
    assert report.phases == (
        Phase.OUTSIDE,
        Phase.ROUTER,
        Phase.PERMUTE,
        Phase.DISPATCH,
        Phase.EXPERT_GEMM,
        Phase.COMBINE,
        Phase.UNPERMUTE,
    )
    assert all(layer.counted for layer in report.layers)


def test_every_expected_site_fires_in_a_step(record: Make) -> None:
    """Coverage of a healthy model is whole; `uninstrument` expects nothing any more."""
    recording, model = record(), olmoe()
    recording.tracer.instrument(model)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    recording.records()
    metrics = recording.tracer.metrics
    assert metrics.expected_sites == 0
    assert metrics.seen_sites == 2 * 3 + 1


def test_state_dict_and_parameter_names_are_unchanged(record: Make) -> None:
    """Checkpoints of an instrumented model are those of the plain one."""
    model = olmoe()
    names, before = list(model.state_dict()), copy.deepcopy(model.state_dict())
    record().tracer.instrument(model)
    assert list(model.state_dict()) == names
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("make_model", [Decoder, olmoe], ids=["reference", "transformers"])
def test_a_copy_of_an_instrumented_model_is_a_plain_model(
    record: Make, make_model: Callable[[], nn.Module], copied: str
) -> None:
    """A weight average, a snapshot: it has its own weights, computes the same, and is not instrumented."""
    recording, model = record(), make_model()
    recording.tracer.instrument(model)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert not any(mark_of(value) for space in namespaces(twin) for value in space.values())
    argument = torch.randn(3, 8) if isinstance(model, Decoder) else torch.ones(1, 4, dtype=torch.int64)
    expected = model(argument)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    actual = twin(argument)
    if not isinstance(expected, torch.Tensor):
        expected, actual = expected.logits, actual.logits
    assert torch.equal(actual, expected)
    assert len(recording.records()) == 1


def test_an_exception_in_a_layer_closes_its_intervals_with_an_error(record: Make) -> None:
    """The model's own exception passes unchanged, and the rows say where it was raised."""
    recording, model = record(), Decoder()
    recording.tracer.instrument(model)
    error = ValueError("bad expert")

    def broken(dispatched: Any) -> torch.Tensor:
        recording.time.advance(5)
        raise error

    recording.tracer.uninstrument()
    model.layers[1]["mlp"].compute = broken
    recording.tracer.instrument(model)
    with pytest.raises(ValueError, match="bad expert") as caught, recording.tracer.step():
        model(torch.randn(3, 8))
    assert caught.value is error
    (step,) = recording.records()
    assert [(row.layer, row.phase) for row in step.phases if row.flags & 8] == [(1, Phase.EXPERT_GEMM)]


def test_a_callable_that_cannot_be_wrapped_is_skipped_with_the_reason(
    record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the model is instrumented all the same."""

    class Locked(ReferenceMoE):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "route":
                raise AttributeError("locked")
            super().__setattr__(name, value)

    report = record().tracer.instrument(Locked(8, 16, num_experts=4, top_k=2))
    assert report
    assert [skip for skip in report.skipped if skip not in compiled.LIMITS] == [
        ("route", "cannot be wrapped: locked")
    ]


def test_a_model_that_is_itself_a_layer_is_instrumented(record: Make) -> None:
    """Layer and top forward stack on one attribute, and both come off again."""
    recording, layer = record(), ReferenceMoE(8, 16, num_experts=4, top_k=2)
    before = dict(vars(layer))
    recording.tracer.instrument(layer)
    layer(torch.randn(5, 8))
    recording.tracer.uninstrument()
    assert dict(vars(layer)) == before
    (step,) = recording.records()
    assert [(row.kind, sum(row.counts)) for row in step.experts] == [(CountKind.ROUTED, 10)]


def test_a_model_that_is_instrumented_inside_a_step_is_counted_from_the_next_one(record: Make) -> None:
    """The open step has no counter for it: nothing is counted wrongly, and nothing fails."""
    recording, first, second = record(), Decoder(), Decoder()
    recording.tracer.instrument(first)
    with recording.tracer.step():
        recording.tracer.instrument(second)
        second(torch.randn(3, 8))
    with recording.tracer.step():
        second(torch.randn(3, 8))
    records = recording.records()
    assert [sum(sum(row.counts) for row in step.experts) for step in records] == [0, 12]
    assert recording.tracer.guard.errors == {}


def test_counts_of_a_step_that_waits_for_the_drain_survive_instrumenting_another_model(record: Make) -> None:
    """A buffer keeps the counter that it was filled with until it is taken again."""
    recording, model = record(), Decoder()
    recording.tracer.instrument(model)
    pool = recording.tracer._buffers.ready(None)
    held: list[StepBuffer] = []
    pool.hand_over = held.append  # type: ignore[method-assign]
    with recording.tracer.step():
        model(torch.randn(3, 8))
    recording.tracer.instrument(Decoder())
    (buffer,) = held
    routed = [row for row in buffer.counter.rows() if row.kind is CountKind.ROUTED]
    assert [sum(row.counts) for row in routed] == [6, 6]


def test_the_same_helper_under_another_modules_name_is_wrapped_once(record: Make) -> None:
    """A collective that a framework imported after it was wrapped is the wrapper already."""
    tracer = record().tracer
    installer = tracer._installer
    installer.functions.hook_collectives()
    imported = ModuleType("framework")
    imported.all_to_all_single = torch.distributed.all_to_all_single  # type: ignore[attr-defined]
    from moetrace.adapters.base import Call, Target
    from moetrace.record.sites import Role

    installer.placing.place(
        installer.functions.patches,
        Target(
            owner=imported,
            attribute="all_to_all_single",
            role=Role.EXCHANGE,
            name="framework.all_to_all_single",
            call=Call.LAUNCH,
        ),
    )
    assert vars(imported)["all_to_all_single"] is torch.distributed.all_to_all_single
