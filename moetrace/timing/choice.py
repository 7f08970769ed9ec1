"""Which clock times the phases: by setting and by the device that the model is on."""

from __future__ import annotations

import logging

from moetrace.errors import ConfigError
from moetrace.timing.clock import Clock, HostClock

logger = logging.getLogger("moetrace")


def clock_for(setting: str, device_type: str) -> Clock:
    """The clock of a setting (auto, host, cuda, device) for a model on a device of this type.

    Raises:
        ConfigError: the clock that was asked for cannot be had here.
    """
    if setting == "cuda" or (setting == "auto" and device_type == "cuda"):
        return _cuda_clock()
    if setting == "device" or (setting == "auto" and device_type not in ("cpu", "meta")):
        return _accelerator_clock(device_type, required=setting == "device")
    return HostClock()


def _accelerator_clock(device_type: str, *, required: bool) -> Clock:
    from moetrace.timing.accelerator import AcceleratorClock, AcceleratorDevice

    try:
        import torch

        if device_type == "cpu":
            current = torch.accelerator.current_accelerator()
            device_type = "cpu" if current is None else current.type
        return AcceleratorClock(AcceleratorDevice(device_type, torch))
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if required:
            raise ConfigError(
                f"clock='device': torch has no timing events for {device_type} here ({reason}); "
                "auto or host expected"
            ) from error
        logger.warning(
            "moetrace: no timing events for %s (%s): phases are timed by the host, which sees launches "
            "and not the device's work",
            device_type,
            reason,
        )
        return HostClock()


def _cuda_clock() -> Clock:
    try:
        import torch
    except ImportError as error:
        raise ConfigError("clock='cuda': torch is not installed") from error
    if not torch.cuda.is_available():
        raise ConfigError("clock='cuda': torch sees no CUDA device here; auto or host expected")
    from moetrace.timing.cuda_events import CudaClock

    return CudaClock()
