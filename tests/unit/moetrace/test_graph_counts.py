"""What replays of captured graphs add to a step's counts, checks, receipts and co-activation."""

from __future__ import annotations

import torch

from moetrace.instrument.coactivation import CoactivationSampler
from moetrace.instrument.routing import StepCounter
from moetrace.record.count_sites import CountSite
from moetrace.record.receipts import settle
from moetrace.record.types import ViolationRow
from moetrace_schemas.enums import CoactivationSpan, CountKind, RoutingViolation

CPU = torch.device("cpu")
SITES = [CountSite(layer, 4, kind) for layer in (0, 1) for kind in (CountKind.ROUTED, CountKind.EXECUTED)]
ROUTED = (0, 2)
IDS = torch.tensor([[0, 1], [2, 2]])


def graph_counter(*, checking: bool, layers: tuple[int, ...] = (0,)) -> StepCounter:
    """The counter of a graph in which these layers were captured, behind one replay."""
    counter = StepCounter(SITES, CPU)
    counter.checking = checking
    pass_through(counter, layers)
    counter.seal()
    counter.zero()
    pass_through(counter, layers)
    return counter


def pass_through(counter: StepCounter, layers: tuple[int, ...], executed: torch.Tensor = IDS) -> None:
    """What the wrappers of these layers add in one forward."""
    for layer in layers:
        counter.add(ROUTED[layer], IDS)
        counter.add_executed(ROUTED[layer], executed)


def step_counter(*, checking: bool, sampler: CoactivationSampler | None = None) -> StepCounter:
    """The counter of an open step."""
    counter = StepCounter(SITES, CPU)
    counter.begin(checking=checking, coactivation=sampler.take() if sampler is not None else None)
    return counter


def told(counter: StepCounter) -> tuple[dict[tuple[int, CountKind], tuple[int, ...]], list[ViolationRow]]:
    """What leaves the process: counts by layer and kind, and violations."""
    counter.finish()
    settled = settle(
        counter.rows(),
        counter.sites,
        seen=counter.violations(),
        checking=counter.checking,
        unjudged=counter.unjudged,
    )
    return {(row.layer, row.kind): row.counts for row in settled.experts}, list(settled.violations)


def test_a_layer_that_ran_eagerly_and_in_a_replay_has_lost_nothing() -> None:
    """The replay shows no executed rows: what was routed in it is not missing from the experts."""
    step = step_counter(checking=True)
    pass_through(step, (0, 1))
    step.merge(graph_counter(checking=False))
    counts, violations = told(step)
    assert counts == {(0, CountKind.ROUTED): (2, 2, 4, 0), (1, CountKind.ROUTED): (1, 1, 2, 0)}
    duplicates = RoutingViolation.DUPLICATE_EXPERT
    assert violations == [ViolationRow(layer=layer, violation=duplicates, count=1) for layer in (0, 1)]


def test_layers_that_no_replay_touched_are_still_judged() -> None:
    """Only what a graph counted in part is left alone."""
    step = step_counter(checking=True)
    pass_through(step, (0, 1), executed=torch.tensor([[0, 1], [2, 9]]))
    step.merge(graph_counter(checking=False))
    _, violations = told(step)
    assert ViolationRow(layer=1, violation=RoutingViolation.CONSERVATION, count=1) in violations
    assert not any(row.layer == 0 and row.violation is RoutingViolation.CONSERVATION for row in violations)


def test_a_graph_captured_with_checks_brings_them_to_checked_steps() -> None:
    """Cells and executed rows of two replays add up; a step that is not checked tells neither."""
    step, unchecked = step_counter(checking=True), step_counter(checking=False)
    for counter in (step, unchecked):
        counter.merge(graph_counter(checking=True))
        counter.merge(graph_counter(checking=True))
    counts, violations = told(step)
    assert counts == {(0, CountKind.ROUTED): (2, 2, 4, 0)}
    assert violations == [ViolationRow(layer=0, violation=RoutingViolation.DUPLICATE_EXPERT, count=2)]
    assert told(unchecked) == ({(0, CountKind.ROUTED): (2, 2, 4, 0)}, [])


def test_a_replay_of_a_dummy_batch_inside_a_step_adds_what_was_received() -> None:
    """What it routed is nobody's, and the step's kinds are not compared; the step after it is as any."""
    sites = [
        CountSite(0, 4, ep_size=2),
        CountSite(0, 4, CountKind.RECEIVED),
        CountSite(0, 4, CountKind.EXECUTED),
    ]
    graph, step = StepCounter(sites, CPU), StepCounter(sites, CPU)
    graph.checking = True
    for index in range(3):
        graph.add(index, IDS)
    graph.seal()
    step.begin(checking=True)
    step.add(0, IDS)
    step.add(1, IDS)
    step.begin_dummy()
    step.merge(graph)
    step.in_dummy = False
    counts, violations = told(step)
    assert counts == {(0, CountKind.ROUTED): (1, 1, 2, 0), (0, CountKind.RECEIVED): (2, 2, 4, 0)}
    # Of the step's own pairs; the replay's are not looked at.
    assert violations == [ViolationRow(layer=0, violation=RoutingViolation.DUPLICATE_EXPERT, count=1)]
    step.begin(checking=False)
    step.merge(graph)
    assert told(step)[0] == {(0, CountKind.ROUTED): (1, 1, 2, 0), (0, CountKind.RECEIVED): (1, 1, 2, 0)}


def test_the_next_step_knows_nothing_of_the_replays_of_the_last() -> None:
    """A buffer's counter is used again: what was not judged then is judged now."""
    step = step_counter(checking=True)
    step.merge(graph_counter(checking=False))
    step.begin(checking=True)
    pass_through(step, (0,), executed=torch.tensor([[0, 1], [2, 9]]))
    _, violations = told(step)
    assert ViolationRow(layer=0, violation=RoutingViolation.CONSERVATION, count=1) in violations


def test_pairs_of_recompute_in_a_graph_count_once_per_replay() -> None:
    """They are a shape, and no device adds them."""
    graph = StepCounter(SITES, CPU)
    graph.add_recompute(0, IDS)
    graph.seal()
    step = step_counter(checking=False)
    step.merge(graph)
    step.merge(graph)
    assert told(step)[0] == {(0, CountKind.RECOMPUTE): (8,)}


def test_numbers_that_the_host_knew_at_capture_are_none_of_a_replay() -> None:
    """They were those of the captured batch; the layer's kinds are not compared either."""
    graph = StepCounter(SITES, CPU)
    graph.checking = True
    graph.add_rows(1, 3, 5)
    graph.add(0, IDS)
    graph.seal()
    step = step_counter(checking=True)
    step.merge(graph)
    counts, violations = told(step)
    assert counts == {(0, CountKind.ROUTED): (1, 1, 2, 0)}
    assert [row.violation for row in violations] == [RoutingViolation.DUPLICATE_EXPERT]


def test_a_graph_of_other_sites_adds_nothing() -> None:
    """Captured before more was instrumented: its rows are other layers' rows now, though as many."""
    other = StepCounter([CountSite(7, 4, site.kind) for site in SITES], CPU)
    other.add(0, IDS)
    other.seal()
    step = step_counter(checking=False)
    step.merge(other)
    assert told(step) == ({}, [])


def test_pairs_of_a_layer_that_a_replay_ran_too_are_left_out() -> None:
    """Its tokens are counted whole and its pairs in part; pairs with the next layer as well."""
    sampler = CoactivationSampler(SITES, CPU, layers=2)
    step = step_counter(checking=False, sampler=sampler)
    pass_through(step, (0, 1))
    step.merge(graph_counter(checking=False, layers=(1,)))
    pass_through(step, (0, 1))
    told(step)
    (row,) = step.coactivation_rows()
    assert (row.layer, row.span, row.pairs) == (0, CoactivationSpan.WITHIN, ((0, 1, 2),))


def test_the_next_sample_is_whole_again() -> None:
    """What a replay left out of one sample is in the next."""
    sampler = CoactivationSampler(SITES, CPU, layers=2)
    step = step_counter(checking=False, sampler=sampler)
    step.merge(graph_counter(checking=False))
    assert told(step)[0]
    assert step.coactivation_rows() == ()
    step.begin(checking=False, coactivation=sampler.take())
    pass_through(step, (0, 1))
    step.finish()
    spans = {(row.layer, row.span) for row in step.coactivation_rows()}
    assert spans == {(0, CoactivationSpan.WITHIN), (0, CoactivationSpan.ACROSS), (1, CoactivationSpan.WITHIN)}
