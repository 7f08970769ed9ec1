"""Wraps exchanges that hand back what ends them: an event to wait for, or a hook that receives.

DeepEP's buffers return (.., event) or (.., event, hook). With a hook the call only sends, and rows arrive
when the caller runs the hook; so the hook in the result is replaced by one that is timed as the wait.
Nothing is replaced while no step is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moetrace.instrument.patches import mark_wrapper
from moetrace.instrument.wrap import RETIRED, Recorder, TorchState, timed_launch, timed_wait


def end_of(result: Any) -> Any | None:
    """What ends an exchange by its result: the hook, else the event, else None where it has ended."""
    if not isinstance(result, tuple) or not result:
        return None
    if callable(result[-1]):
        return result[-1]
    for item in result[-2:]:
        if hasattr(item, "current_stream_wait") and getattr(item, "event", None) is not None:
            return item
    return None


def _launch_handle(result: Any) -> int:
    # Below 0: an object that is waited for by itself is never guessed.
    return -id(end_of(result)) if end_of(result) is not None else 0


def timed_receive(
    function: Callable[..., Any], recorder: Recorder, site: int, wait_site: int
) -> Callable[..., Any]:
    """Wrap an exchange whose result may hold a receive hook; events are waited for by their own method."""
    launch = timed_launch(function, recorder, site, _launch_handle)
    state = TorchState()

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        buffer = recorder.buffer
        if buffer is None or state.compiling():
            return function(*args, **kwargs)
        result = launch(*args, **kwargs)
        if not isinstance(result, tuple) or not result or not callable(result[-1]):
            return result
        hook = result[-1]
        receive = timed_wait(_call, recorder, wait_site, lambda called: (-id(called),), guess=False)
        return (*result[:-1], functools.partial(receive, hook))

    def retire() -> None:
        nonlocal recorder
        recorder = RETIRED

    return mark_wrapper(wrapper, function, retire)


def _call(hook: Callable[[], Any]) -> Any:
    return hook()
