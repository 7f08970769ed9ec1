"""Slows one rank in one phase: the known truth that a demo run is checked against.

Installed before `instrument`, on the model's own callables, so that the tracer sees a model that is
slow and not a tracer that is told so. A delay in dispatch or combine lies before the exchange: the
rank enters its dispatch, but the collective is issued late.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from moetrace.adapters.transformers import EXPERTS_MODULE, PARALLEL_MODULE, parallel_implementation
from moetrace.demo.plan import Injection
from moetrace_schemas.enums import Phase


class Injector:
    """Holds where the model is (step and layer) and the delays that apply there."""

    def __init__(self, injections: tuple[Injection, ...], rank: int) -> None:
        self._delays: dict[Phase, list[Injection]] = defaultdict(list)
        for injection in injections:
            if injection.rank == rank:
                self._delays[injection.phase].append(injection)
        self.step = 0
        self.layer = -1
        self._in_combine = False
        self._gemm_pending = False

    def install(self, model: Any) -> None:
        """Patch the model's callables; does nothing on a rank without delays."""
        if not self._delays:
            return
        for layer, block in enumerate(model.model.layers):
            if hasattr(block.mlp, "experts"):
                self._install_layer(layer, block)
        self._install_names()

    def _install_layer(self, layer: int, block: Any) -> None:
        moe = block.mlp
        self._before(block.self_attn, "forward", Phase.OUTSIDE, layer)
        self._before(getattr(moe, "gate", None) or moe.router, "forward", Phase.ROUTER, layer)
        if hasattr(moe, "shared_experts"):
            self._before(moe.shared_experts, "forward", Phase.SHARED_EXPERT, layer)
        implementation = parallel_implementation(moe.experts)
        if implementation is None:
            self._enter(moe.experts, "forward", layer)
            return
        self._before(implementation, "_dispatch_tokens", Phase.PERMUTE, layer)
        self._enter(implementation, "experts_forward", layer)
        self._around_combine(implementation, layer)

    def _install_names(self) -> None:
        import importlib

        experts = importlib.import_module(EXPERTS_MODULE)
        self._replace(experts, "_grouped_linear", lambda function: self._delayed_gemm(function))
        if not {Phase.DISPATCH, Phase.COMBINE} & self._delays.keys():
            return
        import torch.distributed as distributed
        from torch.distributed import _functional_collectives as functional

        parallel = importlib.import_module(PARALLEL_MODULE)

        # The collectives are looked up at call time: the exchange itself is theirs, the delay is not.
        def late_counts(*args: Any, **kwargs: Any) -> Any:
            self._delay(Phase.DISPATCH, self.layer)
            return distributed.all_to_all_single(*args, **kwargs)

        def late_rows(*args: Any, **kwargs: Any) -> Any:
            if self._in_combine:
                self._delay(Phase.COMBINE, self.layer)
            return functional.all_to_all_single_autograd(*args, **kwargs)

        parallel.all_to_all_single = late_counts  # type: ignore[attr-defined, unused-ignore]
        parallel.all_to_all_single_autograd = late_rows  # type: ignore[attr-defined, unused-ignore]

    def _delay(self, phase: Phase, layer: int) -> None:
        for injection in self._delays.get(phase, ()):
            if injection.layer in (None, layer) and self.step % injection.every == 0:
                time.sleep(injection.delay_ms / 1e3)

    def _before(self, owner: Any, attribute: str, phase: Phase, layer: int) -> None:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def delayed(*args: Any, **kwargs: Any) -> Any:
                self.layer = layer
                self._delay(phase, layer)
                return function(*args, **kwargs)

            return delayed

        self._replace(owner, attribute, make)

    def _enter(self, owner: Any, attribute: str, layer: int) -> None:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def entered(*args: Any, **kwargs: Any) -> Any:
                self.layer = layer
                self._gemm_pending = True
                return function(*args, **kwargs)

            return entered

        self._replace(owner, attribute, make)

    def _delayed_gemm(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            if self._gemm_pending:
                self._gemm_pending = False
                self._delay(Phase.EXPERT_GEMM, self.layer)
            return function(*args, **kwargs)

        return delayed

    def _around_combine(self, implementation: Any, layer: int) -> None:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def combined(*args: Any, **kwargs: Any) -> Any:
                self.layer, self._in_combine = layer, True
                result = function(*args, **kwargs)
                self._in_combine = False
                self._delay(Phase.UNPERMUTE, layer)
                return result

            return combined

        self._replace(implementation, "_combine_tokens", make)

    @staticmethod
    def _replace(owner: Any, attribute: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        setattr(owner, attribute, make(getattr(owner, attribute)))
