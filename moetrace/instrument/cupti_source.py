"""Kernels by phase from CUPTI, for a stretch that a user asks for: `with tracer.kernels() as trace`.

A diagnosis and not part of the always-on path: while it runs, wrapped calls tell CUPTI an external id for
their launches, and its end waits for the device. CUPTI serves one client at a time, so it steps aside
where a profiler runs, and only one stretch can be open.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

from moetrace.errors import ConfigError
from moetrace.record.kernels import Kernel, KernelReport, attribute, external_id
from moetrace.record.sites import SiteTable

_BUFFER_BYTES = 8 * 1024 * 1024
_open: KernelTrace | None = None


class KernelTrace:
    """One stretch. `report` is there once it has ended."""

    def __init__(self, sites: SiteTable, cupti: Any, synchronize: Callable[[], None]) -> None:
        self.report = KernelReport()
        self._sites = sites
        self._cupti = cupti
        self._synchronize = synchronize
        self._kinds = (cupti.ActivityKind.CONCURRENT_KERNEL, cupti.ActivityKind.EXTERNAL_CORRELATION)
        self._kernels: list[Kernel] = []
        self._external_ids: dict[int, int] = {}

    def __enter__(self) -> KernelTrace:
        """Start.

        Raises:
            ConfigError: a profiler or another stretch runs, or CUPTI refuses.
        """
        global _open
        if _open is not None:
            raise ConfigError("kernels(): another stretch is open; CUPTI serves one at a time")
        if _profiler_runs():
            raise ConfigError("kernels(): a profiler runs; CUPTI serves one at a time, so end it first")
        enabled = []
        try:
            self._cupti.activity_register_callbacks(_buffer, self._completed)
            for kind in self._kinds:
                self._cupti.activity_enable(kind)
                enabled.append(kind)
        except self._cupti.cuptiError as error:
            for kind in enabled:
                self._cupti.activity_disable(kind)
            raise ConfigError(f"kernels(): CUPTI refuses ({error}); is another profiler attached?") from error
        _open = self
        return self

    def __exit__(self, *error: object) -> None:
        global _open
        _open = None
        try:
            self._synchronize()
        finally:
            for kind in self._kinds:
                self._cupti.activity_disable(kind)
        self._cupti.activity_flush_all(0)
        self.report = attribute(self._kernels, self._external_ids, self._sites.sites)

    def push(self, number: int) -> None:
        """Launches from here on are those of an external id."""
        self._cupti.activity_push_external_correlation_id(self._cupti.ExternalCorrelationKind.CUSTOM0, number)

    def pop(self) -> None:
        """Those of the enclosing call again."""
        self._cupti.activity_pop_external_correlation_id(self._cupti.ExternalCorrelationKind.CUSTOM0)

    def _completed(self, activities: list[Any]) -> None:
        for activity in activities:
            if activity.kind == self._cupti.ActivityKind.EXTERNAL_CORRELATION:
                self._external_ids[activity.correlation_id] = activity.external_id
            elif activity.kind == self._cupti.ActivityKind.CONCURRENT_KERNEL:
                self._kernels.append(
                    Kernel(
                        name=activity.name,
                        start_ns=activity.start,
                        end_ns=activity.end,
                        stream=activity.stream_id,
                        grid=(activity.grid_x, activity.grid_y, activity.grid_z),
                        block=(activity.block_x, activity.block_y, activity.block_z),
                        correlation=activity.correlation_id,
                    )
                )


class LaunchIds:
    """Push and pop for moetrace.instrument.nvtx.ranged: nothing unless a stretch is open."""

    def __init__(self, site: int) -> None:
        self._site = site
        self._pushed: list[KernelTrace | None] = []

    def push(self, label: str) -> None:
        """A wrapped call begins."""
        trace = _open
        if trace is not None:
            trace.push(external_id(next(_calls), self._site))
        # Last: a call whose id was refused pops nothing.
        self._pushed.append(trace)

    def pop(self) -> None:
        """It ends; with what it began with, should the stretch have ended meanwhile."""
        trace = self._pushed.pop()
        if trace is not None:
            trace.pop()


_calls = itertools.count(1)


def kernel_trace(sites: SiteTable, *, wrapped: bool) -> KernelTrace:
    """One stretch, to be entered; its `report` is there once it was left.

    Its end waits for the device.

    Raises:
        ConfigError: calls were not wrapped for it, or CUPTI cannot be had.
    """
    if not wrapped:
        raise ConfigError("kernels(): needs init(kernels=True), so that calls are wrapped for it")
    cupti = load_cupti()
    import torch

    return KernelTrace(sites, cupti, torch.cuda.synchronize)


def load_cupti() -> Any:
    """The package's module.

    Raises:
        ConfigError: the package or a library of the driver is not there.
    """
    try:
        return importlib.import_module("cupti.cupti")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"kernels(): CUPTI cannot be loaded ({reason}); pip install cupti-python, on a machine with an "
            "NVIDIA driver"
        ) from error


def _buffer() -> tuple[int, int]:
    return _BUFFER_BYTES, 0


def _profiler_runs() -> bool:
    autograd = getattr(getattr(sys.modules.get("torch"), "_C", None), "_autograd", None)
    enabled = getattr(autograd, "_profiler_enabled", None)
    # A torch that does not say: CUPTI itself refuses a second client.
    return enabled is not None and bool(enabled())
