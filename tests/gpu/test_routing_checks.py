"""Checked steps and co-activation on a real device: no sync, and the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch

from moetrace.instrument.coactivation import CoactivationSampler
from moetrace.instrument.routing import StepCounter, padding_flags
from moetrace.record.count_sites import CountSite
from moetrace.record.types import CoactivationRow, ExpertRow, ViolationRow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SITES = [CountSite(layer, 64, weight_sums=(1.0,)) for layer in range(3)]

Result = tuple[tuple[ExpertRow, ...], list[ViolationRow], tuple[CoactivationRow, ...]]


def counted(device: torch.device, *, no_sync: bool) -> Result:
    """Three layers of 512 tokens with padding, a few duplicates and weights that do not add up."""
    generator = torch.Generator().manual_seed(0)
    routes = [torch.rand(512, 64, generator=generator).topk(8).indices for _ in SITES]
    routes[1][:5, 1] = routes[1][:5, 0]
    weights = torch.full((512, 8), 1 / 8)
    weights[3:6] *= 2
    ids = [route.to(device) for route in routes]
    here, padding = weights.to(device), padding_flags((torch.arange(512) < 500).long().unsqueeze(0))
    assert padding is not None
    padding = padding.to(device)
    counter = StepCounter(SITES, device)
    sampler = CoactivationSampler(SITES, device, layers=3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if no_sync else "default")
    try:
        counter.begin(checking=True, coactivation=sampler.take())
        counter.padding = padding
        for index, route in enumerate(ids):
            counter.add(index, route)
            counter.check_weights(index, here)
        counter.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert counter.ready()
    return counter.rows(), counter.violations(), counter.coactivation_rows()


def test_checks_and_pairs_are_those_of_the_cpu_and_never_wait() -> None:
    """Any operation that waits for the device would be an error."""
    on_device = counted(torch.device("cuda"), no_sync=True)
    on_host = counted(torch.device("cpu"), no_sync=False)
    assert on_device == on_host
    assert len(on_device[1]) == 4
