"""Backward time of wrapped calls, from hooks on the autograd nodes at their boundaries.

The backward of a call begins when the node that made its output runs, and ends when the node that made
its input runs::

    forward     x --[ experts ]--> y --[ combine ]--> z
    backward    gradient of x <--[ experts ]-- y <--[ combine ]-- gradient of z
                node of x runs: end    node of y runs: end of combine, begin of experts

Hooks look and change nothing: no node is added to the graph, so gradients are added up in the same
order. The engine runs ready nodes latest first, so that nodes of a call run before those of the calls
in front of it; what is still open when an earlier call begins has ended. One node takes one mark.

The engine may call hooks on a thread of its own, while the model's thread waits for it.

A backward that runs in a later step than its forward is recorded in neither: hooks know their step, and a
compiled graph, whose marks do not, is known by the number of its autograd node. Threads number theirs apart:
on the step's own thread all since its begin are the step's, and on others the last one that was made when a
call begins in a graph. A graph without gradients makes none, and what was made last is then older: known if
it was seen in a recorded step, else taken for the step's, as are those of other threads with high numbers.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from moetrace.instrument.autograd_state import current_node, graph_task, next_node
from moetrace.record.backward import BACKWARD

if TYPE_CHECKING:
    from moetrace.instrument.wrap import Recorder
    from moetrace.record.buffer import StepBuffer

_STAGE = "backward"
_DEPTH = 3
"""How deep containers of arguments and results are searched for tensors."""


class _LastGraphs(threading.local):
    """Of each recorder: number of the node that was the last one when a graph ran on this thread."""

    def __init__(self) -> None:
        self.nodes: weakref.WeakKeyDictionary[Recorder, int] = weakref.WeakKeyDictionary()


_last_graphs = _LastGraphs()


class _Call:
    """One forward call whose backward has not run yet."""

    __slots__ = ("began", "done_in", "forward_end", "forward_start", "opened_in", "serial", "site")

    def __init__(self, site: int, forward_start: int, forward_end: int, serial: int) -> None:
        self.site = site
        self.forward_start = forward_start
        self.forward_end = forward_end
        self.serial = serial
        self.began = -1
        self.opened_in = -1
        """Graph task in which the backward is running."""
        self.done_in = -1
        """Graph task in which it ended; with a graph that is kept there may be further ones."""


class BackwardMarks:
    """The backward side of one step buffer."""

    def __init__(self, buffer: StepBuffer, recorder: Recorder) -> None:
        self._buffer = buffer
        self._recorder = recorder
        self._open: list[_Call] = []
        self._serial = 0
        self._last_node = -1
        self._last_mark = -1
        self._task = -1
        self._graph_open: list[tuple[int, int]] = []
        """(site, start mark) of backward calls that began inside a compiled graph."""
        self._thread = threading.get_ident()
        self._first_node = next_node()
        """Lower ones of the step's thread were made before the step."""
        self._graph_nodes: set[int] = set()
        """Nodes of compiled graphs whose forward ran in the step, on other threads than its own."""

    def clear(self) -> None:
        """Forget the last step; its hooks, should they still fire, do nothing."""
        self._serial += 1
        self._open.clear()
        self._graph_open.clear()
        self._graph_nodes.clear()
        self._thread = threading.get_ident()
        self._first_node = next_node()
        self._last_node = self._last_mark = self._task = -1

    def note(self, site: int, start: int, end: int, inputs: Any, result: Any) -> None:
        """Watch the backward of a call that has just returned. No effect where it has none. Never raises."""
        guard = self._recorder.guard
        if guard.is_off(_STAGE):
            return
        try:
            self._watch(site, start, end, inputs, result)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            # A stage of its own: nodes that cannot be watched cost the backward, and not the step.
            guard.caught(_STAGE, error)

    def _watch(self, site: int, start: int, end: int, inputs: Any, result: Any) -> None:
        outputs = _nodes(result)
        if not outputs:
            return
        sources = _nodes(inputs)
        call = _Call(site, start, end, self._serial)
        for number, node in outputs.items():
            # What is handed through is made, and ended, elsewhere.
            if number not in sources:
                node.register_prehook(functools.partial(self._begin, call, number))
        for number, node in sources.items():
            node.register_prehook(functools.partial(self._end, call, number))

    def _begin(self, call: _Call, node: int, gradients: Any) -> None:
        task = graph_task()
        if not self._is_live(call) or task in (call.opened_in, call.done_in):
            return
        try:
            mark = self._mark(node)
            for other in [other for other in self._open if call.forward_end <= other.forward_start]:
                self._close(other, mark)
            self._finish_with(task)
            call.began, call.opened_in = mark, task
            self._open.append(call)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._recorder.record_failed(error)

    def _end(self, call: _Call, node: int, gradients: Any) -> None:
        if not self._is_live(call) or call.opened_in == -1:
            return
        try:
            self._close(call, self._mark(node))
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._recorder.record_failed(error)

    def graph_runs(self) -> None:
        """A call begins in the forward of a compiled graph; its node, if it has one, is the last one made."""
        if threading.get_ident() == self._thread:
            return
        node = next_node() - 1
        # The same as before: a further call in one graph, or a graph that has no node of its own.
        if _last_graphs.nodes.get(self._recorder) != node:
            _last_graphs.nodes[self._recorder] = node
            self._graph_nodes.add(node)

    def is_of_this_step(self) -> bool:
        """Whether the compiled graph whose backward is running had its forward in this step."""
        node = current_node()
        if node is None:
            return True
        number = node._sequence_nr()
        return number >= self._first_node or number in self._graph_nodes

    def graph_begin(self, site: int) -> None:
        """The backward of a call begins inside a compiled graph. May raise."""
        if not self.is_of_this_step():
            return
        self._finish_with(graph_task())
        self._graph_open.append((site, self._buffer.mark()))

    def graph_end(self, site: int) -> None:
        """The backward of a call inside a compiled graph is over, where it has begun. May raise."""
        for at in range(len(self._graph_open) - 1, -1, -1):
            if self._graph_open[at][0] == site:
                self._buffer.add(site, self._graph_open.pop(at)[1], self._buffer.mark(), BACKWARD)
                return

    def _finish_with(self, task: int) -> None:
        """See to it that what nothing ends (its inputs need no gradient) ends with the pass."""
        if task not in (-1, self._task):
            self._task = task
            callback = functools.partial(self._finish, task, self._serial)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _finish(self, task: int, serial: int) -> None:
        if serial != self._serial or self._recorder.buffer is not self._buffer:
            return
        try:
            mark = self._buffer.mark()
            for call in [call for call in self._open if call.opened_in == task]:
                self._close(call, mark)
            while self._graph_open:
                site, start = self._graph_open.pop()
                self._buffer.add(site, start, mark, BACKWARD)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._recorder.record_failed(error)

    def _is_live(self, call: _Call) -> bool:
        """Whether the step of a call is still being recorded: a backward may run after it."""
        return call.serial == self._serial and self._recorder.buffer is self._buffer

    def _mark(self, node: int) -> int:
        if node != self._last_node:
            self._last_node, self._last_mark = node, self._buffer.mark()
        return self._last_mark

    def _close(self, call: _Call, mark: int) -> None:
        self._open.remove(call)
        call.done_in, call.opened_in = call.opened_in, -1
        self._buffer.add(call.site, call.began, mark, BACKWARD)


def _nodes(value: Any) -> dict[int, Any]:
    """Nodes by number that made the tensors in arguments or a result; leaves have none."""
    found: dict[int, Any] = {}
    _collect(value, _DEPTH, found)
    return found


def _collect(value: Any, depth: int, found: dict[int, Any]) -> None:
    if isinstance(value, torch.Tensor):
        node = value.grad_fn
        if node is not None:
            found[node._sequence_nr()] = node
        return
    if depth == 0 or value is None:
        return
    if isinstance(value, tuple | list):
        items: Any = value
    elif isinstance(value, dict):
        items = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name, None) for name in value.__dataclass_fields__]
    else:
        return
    for item in items:
        _collect(item, depth - 1, found)
