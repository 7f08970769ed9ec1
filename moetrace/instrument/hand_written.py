"""Wraps the parts of hand-written MoE code: `tracer.wrap(router=..., dispatch=..., layer=3)`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from moetrace.errors import ConfigError, check_whole
from moetrace.instrument.patches import WrapperMark, mark_of, mark_wrapper
from moetrace.instrument.phases import check_layer
from moetrace.instrument.wrap import Observer, timed
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import Phase
from moetrace_schemas.placement import MAX_EXPERTS

if TYPE_CHECKING:
    from moetrace.instrument.install import Installer

PARTS: dict[str, tuple[Role, Phase]] = {
    "router": (Role.PHASE, Phase.ROUTER),
    "permute": (Role.PHASE, Phase.PERMUTE),
    "dispatch": (Role.PHASE, Phase.DISPATCH),
    "experts": (Role.EXPERTS, Phase.EXPERT_GEMM),
    "combine": (Role.PHASE, Phase.COMBINE),
    "unpermute": (Role.PHASE, Phase.UNPERMUTE),
    "shared_expert": (Role.PHASE, Phase.SHARED_EXPERT),
}
"""Arguments of `Tracer.wrap`."""


def check_parts(
    callables: Mapping[str, object], layer: int | None = None, num_experts: int | None = None
) -> None:
    """Refuse what cannot be wrapped, before anything is.

    Raises:
        ConfigError: an unknown name, a value that is not callable, or a number out of range.
    """
    check_layer(layer)
    if num_experts is not None:
        check_whole("num_experts", num_experts)
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ConfigError(f"num_experts={num_experts}: 1 to {MAX_EXPERTS} expected")
        if layer is None:
            raise ConfigError(f"num_experts={num_experts}: counts are per layer: layer=... is needed too")
    for name, function in callables.items():
        if name not in PARTS:
            raise ConfigError(f"wrap({name}=...): no such part; known: {', '.join(PARTS)}")
        if not callable(function):
            raise ConfigError(f"wrap({name}={function!r}): a callable expected")


def wrap_parts(
    installer: Installer,
    callables: Mapping[str, Callable[..., Any]],
    layer: int | None,
    num_experts: int | None,
) -> SimpleNamespace:
    """The wrapped callables under the names they came with; parts that are wrapped already stay so."""
    layer = check_layer(layer)
    if num_experts is not None:
        num_experts = check_whole("num_experts", num_experts)
    installer.functions.hook_collectives()
    result = SimpleNamespace()
    for name, function in callables.items():
        observe = None
        if name == "router" and num_experts is not None and layer is not None:
            observe = installer.count_routes(layer, num_experts, _device_of(callables))
        setattr(result, name, _wrap_part(installer, name, function, layer, observe))
    return result


def _wrap_part(
    installer: Installer, name: str, function: Any, layer: int | None, observe: Observer | None
) -> Any:
    role, phase = PARTS[name]
    is_module = hasattr(function, "forward") and hasattr(function, "named_modules")
    is_method = isinstance(function, MethodType) and not isinstance(function.__self__, type)
    present = vars(function).get("forward") if is_module else function
    if mark := mark_of(function.__func__ if is_method else present):
        if not _has_ended(mark):
            return function
        function = _underneath(mark, function)
    if name in ("dispatch", "combine") and layer is not None:
        observe = installer.placing.splits.observer(layer, phase)
    site = installer.tracer.sites.add(Site(role, phase, layer, f"wrap.{name}[{layer}]", alone=True))

    def make(current: Callable[..., Any]) -> Callable[..., Any]:
        if name in ("dispatch", "combine"):
            current = installer.placing.splits.around(installer.placing.learner.around(current))
        current = installer.placing.with_range(current, site)
        return timed(current, installer.tracer, site, observe=observe)

    if not is_module:
        installer.loose_sites.append(site)
        wrapped = make(function)
        if is_method:
            wrapped = _of_owner(wrapped, function)
        if mark := mark_of(wrapped.__func__ if isinstance(wrapped, MethodType) else wrapped):
            mark.made_for = weakref.ref(installer.tracer)
        return wrapped
    installer.hand_written.replace(function, "forward", make)
    installer.hand_written.sites[site] = (function, "forward")
    return function


def _of_owner(wrapper: Callable[..., Any], method: MethodType) -> MethodType:
    """The wrapper of a method as a method of the same object, which copies of the object have plain.

    As a function it would go into a copy as it is, and compute there with the original's weights; pickle
    would refuse it.
    """
    owner, plain = method.__self__, method.__func__

    @functools.wraps(plain)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs) if self is owner else plain(self, *args, **kwargs)

    mark = mark_of(wrapper)
    return MethodType(mark_wrapper(call, plain, mark.retire if mark else lambda: None), owner)


def _has_ended(mark: WrapperMark) -> bool:
    """Whether it is a function that was wrapped for a tracer which records nothing any more."""
    tracer = mark.made_for() if mark.made_for is not None else None
    return mark.made_for is not None and (tracer is None or tracer.closed)


def _underneath(mark: WrapperMark | None, function: Any) -> Any:
    """What our wrappers, of which the outermost has this mark, are around."""
    if isinstance(function, MethodType) and mark is not None:
        return MethodType(mark.function, function.__self__)
    while mark := mark_of(function):
        function = mark.function
    return function


def _device_of(callables: Mapping[str, Any]) -> Any:
    """Where the first module among the callables, or behind a bound method, keeps its parameters; or None."""
    for function in callables.values():
        module = getattr(function, "__self__", function)
        parameter = next(module.parameters(), None) if hasattr(module, "named_modules") else None
        if parameter is not None:
            return parameter.device
    return None
