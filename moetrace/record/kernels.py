"""Device kernels -> what each phase of each layer ran, and where it left the device idle. Pure.

A kernel belongs to the innermost wrapped call that launched it. Idle is the time between a call's first
and last kernel that none of its kernels covers, on whatever stream::

    call      |== k1 ==|   |=== k2 ===|
                    |= k3 =|              span: k1's start to k2's end; idle: what nothing covers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moetrace.record.sites import Site
from moetrace_schemas.enums import Phase

SITE_BITS = 20
"""An external id is a call's number above its site's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel that ran."""

    name: str
    start_ns: int
    end_ns: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    correlation: int
    """What its launch and an external id have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """All runs of one kernel, in one shape, in one phase."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    runs: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseKernels:
    """What the device did for one wrapped callable."""

    site: str
    layer: int | None
    phase: Phase | None
    calls: int
    busy_ns: int
    """Time in which at least one of its kernels ran."""
    idle_ns: int
    kernels: tuple[KernelUse, ...]
    """Longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """Kernels of a traced stretch."""

    phases: tuple[PhaseKernels, ...] = ()
    """In order of their first kernel."""
    elsewhere_ns: int = 0
    """Time of kernels that no wrapped call launched."""


def external_id(call: int, site: int) -> int:
    """The id under which a call's launches are known."""
    return call << SITE_BITS | site


def attribute(kernels: Iterable[Kernel], external_ids: Mapping[int, int], sites: list[Site]) -> KernelReport:
    """Kernels by the call that launched them.

    Args:
        kernels: what ran.
        external_ids: correlation -> external id.
        sites: by number.
    """
    by_call: defaultdict[int, list[Kernel]] = defaultdict(list)
    elsewhere = 0
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start_ns, kernel.end_ns)):
        number = external_ids.get(kernel.correlation)
        if number is None:
            elsewhere += kernel.end_ns - kernel.start_ns
        else:
            by_call[number].append(kernel)
    by_site: defaultdict[int, list[list[Kernel]]] = defaultdict(list)
    for number, launched in by_call.items():
        by_site[number & ((1 << SITE_BITS) - 1)].append(launched)
    return KernelReport(
        phases=tuple(_phase(sites[site], calls) for site, calls in by_site.items()), elsewhere_ns=elsewhere
    )


def _phase(site: Site, calls: list[list[Kernel]]) -> PhaseKernels:
    busy = [_busy_ns(kernels) for kernels in calls]
    spans = [max(k.end_ns for k in kernels) - kernels[0].start_ns for kernels in calls]
    uses: defaultdict[tuple[str, tuple[int, int, int], tuple[int, int, int]], list[int]] = defaultdict(list)
    for kernels in calls:
        for kernel in kernels:
            uses[kernel.name, kernel.grid, kernel.block].append(kernel.end_ns - kernel.start_ns)
    found = [
        KernelUse(name=name, grid=grid, block=block, runs=len(times), total_ns=sum(times))
        for (name, grid, block), times in uses.items()
    ]
    return PhaseKernels(
        site=site.name,
        layer=site.layer,
        phase=site.phase,
        calls=len(calls),
        busy_ns=sum(busy),
        idle_ns=sum(spans) - sum(busy),
        kernels=tuple(sorted(found, key=lambda use: -use.total_ns)),
    )


def _busy_ns(kernels: list[Kernel]) -> int:
    """Time that kernels in order of their start cover together."""
    busy, until = 0, kernels[0].start_ns
    for kernel in kernels:
        busy += max(0, kernel.end_ns - max(kernel.start_ns, until))
        until = max(until, kernel.end_ns)
    return busy
