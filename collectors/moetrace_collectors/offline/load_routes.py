"""JSON-lines of routes -> expert counts: vLLM-style per-token routes, Megatron router traces. Streamed.

A line holds the experts of one token (`topk_ids`: [k]), of many tokens of one layer (`top_indices`:
[tokens][k]), or of many tokens of every layer (`routed_experts`: [tokens][layers][k]). Lines without
experts, such as a header, may tell the model's name, `num_experts` and `top_k`.

Serving engines run their models before the first request, to size memory and to capture graphs, and a
logger in the router sees those rows too. They are no load, so they are counted apart and left out:

- rows that say so: a flag such as `warmup` or `is_dummy`, or a request named warmup, dummy or profile;
- rows without a request in a file whose other rows have one;
- runs of `DUMMY_RUN` tokens or more of one layer with equal experts and equal weights: a dummy batch
  repeats one token, and no two different tokens share every weight. Only where weights are logged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetrace_collectors.offline.load_recording import (
    CountBuilder,
    LayerKey,
    LoadRecording,
    StepKey,
    decoder_layer,
)
from moetrace_collectors.offline.source import bad_file, json_lines
from moetrace_schemas.enums import ForwardMode

ID_FIELDS = ("topk_ids", "top_indices", "topk_experts", "routed_experts", "expert_ids", "selected_experts")
LAYER_FIELDS = ("layer", "layer_id", "layer_idx", "layer_index")
STEP_FIELDS = ("step", "step_id", "iteration", "forward_pass_id", "batch_id")
MODE_FIELDS = ("forward_mode", "stage", "mode")
REQUEST_FIELDS = ("req_id", "request_id")
WARMUP_FLAGS = ("warmup", "warm_up", "is_warmup")
DUMMY_FLAGS = ("dummy", "is_dummy", "dummy_run", "is_profile", "profile_run", "capture")
DUMMY_RUN = 32
"""Tokens in a row with equal experts and weights that are taken for a dummy batch."""

_WARMUP_NAME = re.compile(r"(?:^|[^a-z])warm[-_ ]?up", re.IGNORECASE)
_DUMMY_NAME = re.compile(r"(?:^|[^a-z])(?:dummy|profile|capture)", re.IGNORECASE)
_KIND_FIELDS = ("type", "kind", "phase", "run", *REQUEST_FIELDS)


def looks_like_routes(record: Mapping[str, Any]) -> bool:
    """Whether a line is a route, or the header of a file of routes."""
    if any(name in record for name in ID_FIELDS):
        return True
    return record.get("type") == "meta" and ("top_k" in record or "layers_logged" in record)


@dataclass(slots=True)
class _Run:
    """Consecutive tokens of one layer with equal experts and weights, not yet counted or left out."""

    key: tuple[StepKey, LayerKey, str]
    signature: tuple[object, object]
    expert_ids: list[int]
    tokens: int = 0


@dataclass(slots=True)
class _Reader:
    path: Path
    counted: CountBuilder
    ownerless: CountBuilder
    """Rows without a request; they are dummy rows only where other rows have one."""
    has_requests: bool = False
    top_ks: set[int] = field(default_factory=set)
    without_step: bool = False
    run: _Run | None = None

    def add(self, number: int, record: Mapping[str, Any]) -> None:
        name = next(name for name in ID_FIELDS if name in record)
        place = f"line {number}, {name}"
        ids = record[name]
        step = self._step(number, record)
        if _depth(ids) == 3:
            for layer, tokens in enumerate(_transpose(ids, self.path, place)):
                self._tokens(record, step, decoder_layer(layer), tokens, place, weights=None)
            return
        layer_key = self._layer(number, record)
        tokens = ids if _depth(ids) == 2 else [ids]
        weights = record.get("topk_weights", record.get("weights"))
        self._tokens(
            record, step, layer_key, tokens, place, weights=[weights] if tokens is not ids else weights
        )

    def _tokens(
        self,
        record: Mapping[str, Any],
        step: StepKey,
        layer: LayerKey,
        tokens: list[Any],
        place: str,
        *,
        weights: Any,
    ) -> None:
        for index, token in enumerate(tokens):
            if not isinstance(token, list) or not all(type(e) is int and -(2**62) < e < 2**62 for e in token):
                raise bad_file(self.path, place, "list of expert ids (integers) expected")
            self.top_ks.add(len(token))
            reason = _left_out_reason(record)
            if reason:
                self.counted.left_out[reason] += len(token)
                continue
            request = next((record[name] for name in REQUEST_FIELDS if name in record), None)
            self.has_requests |= request is not None
            owner = "yes" if request is not None else "no"
            weight = weights[index] if isinstance(weights, list) and index < len(weights) else None
            self._token((step, layer, owner), token, weight)

    def _token(self, key: tuple[StepKey, LayerKey, str], token: list[int], weight: object) -> None:
        signature = (token, weight)
        run = self.run
        if run is not None and run.key == key and run.signature == signature and weight is not None:
            run.tokens += 1
            return
        self.end_run()
        self.run = _Run(key=key, signature=signature, expert_ids=token, tokens=1)

    def end_run(self) -> None:
        """Count the tokens of the run that has ended, or leave them out as a dummy batch."""
        run, self.run = self.run, None
        if run is None:
            return
        step, layer, owner = run.key
        builder = self.counted if owner == "yes" else self.ownerless
        if run.tokens >= DUMMY_RUN:
            builder.left_out["dummy"] += run.tokens * len(run.expert_ids)
        else:
            builder.add_ids(step, layer, run.expert_ids * run.tokens)

    def _layer(self, number: int, record: Mapping[str, Any]) -> LayerKey:
        name = next((name for name in LAYER_FIELDS if name in record), None)
        layer = record[name] if name else None
        if type(layer) is not int or not 0 <= layer < 2**31:
            raise bad_file(self.path, f"line {number}, layer", "layer number of 0 or more expected")
        block = record.get("mtp_idx")
        return (1, block, layer) if type(block) is int else decoder_layer(layer)

    def _step(self, number: int, record: Mapping[str, Any]) -> StepKey:
        name = next((name for name in STEP_FIELDS if name in record), None)
        mode = next((m for name in MODE_FIELDS if (m := _forward_mode(record.get(name)))), None)
        if name is None:
            self.without_step = True
            return (0, mode)
        step = record[name]
        if type(step) is not int or not 0 <= step < 2**62:
            raise bad_file(self.path, f"line {number}, {name}", "step number of 0 or more expected")
        return (step, mode)


def read_routes(path: Path, *, num_experts: int | None = None) -> LoadRecording:
    """The recording in a file of routes.

    Raises:
        UsageError: a line is broken, or no line holds experts.
    """
    counted, ownerless = CountBuilder(path), CountBuilder(path)
    reader = _Reader(path=path, counted=counted, ownerless=ownerless)
    megatron, model_name, header_top_k = False, "", None
    for number, record in json_lines(path):
        if any(name in record for name in ID_FIELDS):
            megatron = megatron or "top_indices" in record
            reader.add(number, record)
            continue
        told = record.get("num_experts", record.get("n_experts"))
        if num_experts is None and type(told) is int and told > 0:
            num_experts = told
        if type(record.get("top_k")) is int:
            header_top_k = record["top_k"]
        model_name = str(record.get("model_id", record.get("model", model_name)))[:200]
    reader.end_run()
    warnings = _settle_owners(reader, path)
    if reader.without_step:
        warnings.append(f"{path}: lines tell no step; they are counted as one step")
    if len(reader.top_ks) == 1:
        top_k: int | None = next(iter(reader.top_ks))
    else:
        top_k = header_top_k
        if reader.top_ks:
            warnings.append(f"{path}: tokens have {min(reader.top_ks)} to {max(reader.top_ks)} experts each")
    return counted.build(
        source=str(path),
        format="megatron_router_trace" if megatron else "vllm_routes",
        num_experts=num_experts,
        top_k=top_k,
        model_name=model_name,
        warnings=warnings,
    )


def _settle_owners(reader: _Reader, path: Path) -> list[str]:
    """Decide about rows without a request, and say what was left out."""
    if reader.has_requests:
        reader.ownerless.leave_out_all("dummy")
    reader.counted.take(reader.ownerless)
    return [
        f"{path}: {pairs} (token, slot) pairs of {reason} rows are left out"
        for reason, pairs in sorted(reader.counted.left_out.items())
        if pairs
    ]


def _left_out_reason(record: Mapping[str, Any]) -> str | None:
    if any(record.get(name) is True for name in WARMUP_FLAGS):
        return "warmup"
    if any(record.get(name) is True for name in DUMMY_FLAGS):
        return "dummy"
    for name in _KIND_FIELDS:
        value = record.get(name)
        if isinstance(value, str):
            if _WARMUP_NAME.search(value):
                return "warmup"
            if _DUMMY_NAME.search(value):
                return "dummy"
    return None


def _forward_mode(value: object) -> ForwardMode | None:
    return ForwardMode(value) if isinstance(value, str) and value in set(ForwardMode) else None


def _depth(value: object) -> int:
    """Levels of lists, looking at first elements only."""
    depth = 0
    while isinstance(value, list) and depth < 4:
        depth += 1
        if not value:
            break
        value = value[0]
    return depth


def _transpose(tokens: list[Any], path: Path, place: str) -> list[list[Any]]:
    """[tokens][layers] -> [layers][tokens]."""
    layers = len(tokens[0])
    if any(not isinstance(token, list) or len(token) != layers for token in tokens):
        raise bad_file(path, place, f"{layers} layers for every token expected")
    return [[token[layer] for token in tokens] for layer in range(layers)]
