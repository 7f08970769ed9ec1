"""Wraps exchanges that hand back what ends them: an event to wait for, or a hook that receives.

DeepEP's buffers return (.., event) or (.., event, hook), or an event alone whose wait returns the rest.
With a hook the call only sends, and rows arrive when the caller runs the hook; so the hook in the result
is replaced by one that is timed as the wait. Nothing is replaced while no step is recorded.

Rows received are counted where the layer's own code does not count them (`CountSite.at_exchange`): of the
layer whose router was called last, at once where the host knows the numbers, else behind the wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from moetrace.adapters.deepep import READ, ReceivedRows, received_rows
from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.torch_state import TorchState
from moetrace.instrument.wrap import RETIRED, Recorder, timed_launch, timed_wait
from moetrace.record.buffer import WIDTH, StepBuffer
from moetrace.record.sites import Site
from moetrace_schemas.enums import Phase

INTERVALS_BACK = 64
"""How far back a layer's router is looked for."""


def is_event(item: Any) -> bool:
    """Whether something is waited for by its own method. Events of 2.x can be called too."""
    return hasattr(item, "current_stream_wait")


def hook_of(result: Any) -> Any | None:
    """The hook that receives what a call has sent, or None."""
    if not isinstance(result, tuple) or not result:
        return None
    return result[-1] if callable(result[-1]) and not is_event(result[-1]) else None


def end_of(result: Any) -> Any | None:
    """What ends an exchange by its result: the hook, else the event, else None where it has ended."""
    hook = hook_of(result)
    if hook is not None:
        return hook
    for item in result[-2:] if isinstance(result, tuple) else (result,):
        if is_event(item) and getattr(item, "event", None) is not None:
            return item
    return None


def _launch_handle(result: Any) -> int:
    # Below 0: an object that is waited for by itself is never guessed.
    end = end_of(result)
    return 0 if end is None else -id(end)


def timed_receive(
    function: Callable[..., Any], recorder: Recorder, site: int, wait_site: int, sites: Sequence[Site]
) -> Callable[..., Any]:
    """Wrap an exchange whose result may hold a receive hook; events are waited for by their own method.

    Args:
        function: the method of a buffer.
        recorder: the tracer.
        site: the call.
        wait_site: the wait for its hook.
        sites: all call sites, for the layer that a call belongs to.
    """
    launch = timed_launch(function, recorder, site, _launch_handle)
    receive = timed_wait(_call, recorder, wait_site, lambda called: (-id(called),), guess=False)
    state = TorchState()
    names = _parameters(function)
    method = getattr(function, "__name__", "")

    def note(buffer: StepBuffer, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        index = _count_site(buffer, sites)
        if index < 0 or state.graph_task() != -1:
            return
        called = {**dict(zip(names, args, strict=False)), **kwargs}
        # Not all of them: what is kept until the wait would keep activations.
        given = {name: called[name] for name in READ if name in called}
        if is_event(result):
            # Deferred: the wait for the event returns what the call would have.
            buffer.arrivals[-id(result)] = lambda late: _count(
                buffer, index, received_rows(method, given, late)
            )
            return
        received = received_rows(method, given, result)
        end = None if received is None or received.known else end_of(result)
        if end is None:
            _count(buffer, index, received)
        else:
            buffer.arrivals[-id(end)] = lambda _: _count(buffer, index, received)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        buffer = recorder.buffer
        if buffer is None or state.compiling():
            return function(*args, **kwargs)
        result = launch(*args, **kwargs)
        recorder.guard.run("received", note, buffer, args, kwargs, result)
        hook = hook_of(result)
        if hook is None:
            return result
        # A named tuple stays one.
        make = getattr(type(result), "_make", tuple)
        return make((*result[:-1], functools.partial(_received, receive, recorder, hook)))

    def retire() -> None:
        nonlocal recorder
        recorder = RETIRED

    return mark_wrapper(wrapper, function, retire)


def timed_event_wait(function: Callable[..., Any], recorder: Recorder, site: int) -> Callable[..., Any]:
    """Wrap a method that waits for an event, with which an exchange ends."""
    wait = timed_wait(function, recorder, site, lambda event: (-id(event),), guess=False)

    @functools.wraps(function)
    def wrapper(event: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(event, *args, **kwargs)
        _arrived(recorder, event, result)
        return result

    def retire() -> None:
        nonlocal recorder, wait
        recorder, wait = RETIRED, function

    return mark_wrapper(wrapper, function, retire)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a method's parameters; none where it does not say: such calls are timed and not counted."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _call(hook: Callable[[], Any]) -> Any:
    return hook()


def _received(receive: Callable[[Any], Any], recorder: Recorder, hook: Any) -> Any:
    result = receive(hook)
    _arrived(recorder, hook, result)
    return result


def _arrived(recorder: Recorder, end: Any, result: Any) -> None:
    buffer = recorder.buffer
    if buffer is not None and buffer.arrivals:
        count = buffer.arrivals.pop(-id(end), None)
        if count is not None:
            recorder.guard.run("received", count, result)


def _count_site(buffer: StepBuffer, sites: Sequence[Site]) -> int:
    """The row for what the layer whose router was called last receives; below 0 where none is counted."""
    counter = buffer.counter
    if counter is None or not counter.at_exchange:
        return -1
    slots = buffer.slots
    oldest = max(buffer.length - INTERVALS_BACK * WIDTH, 0)
    for at in range(buffer.length - WIDTH, oldest - 1, -WIDTH):
        site = sites[slots[at]]
        if site.phase is Phase.ROUTER and site.layer is not None:
            return int(counter.at_exchange.get(site.layer, -1))
    return -1


def _count(buffer: StepBuffer, index: int, received: ReceivedRows | None) -> None:
    if received is None:
        return
    counter, counts = buffer.counter, received.counts
    local, beyond = divmod(counter.sites[index].num_experts, received.ranks)
    if received.ids is not None:
        if not beyond:
            counter.add_local_ids(index, received.ids, received.rank * local)
        return
    if received.sums is not None:
        counts = received.sums.diff(prepend=received.sums.new_zeros(1))
    # Where experts are replicated, a rank's n-th is not the n-th behind the shares of those before it.
    if counts is not None and not beyond and len(counts) == local:
        counter.add_local_counts(index, counts, received.rank)
