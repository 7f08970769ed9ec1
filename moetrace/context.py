"""Who records: run, rank, expert-parallel position. Taken once, from arguments, torch or the launcher."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from moetrace.errors import ConfigError, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Position of this process. `ep_group` is the lowest global rank of its expert-parallel group."""

    run_id: str
    rank: int
    world_size: int
    ep_rank: int
    ep_size: int
    ep_group: int
    host_name: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank}: 0 to {self.world_size - 1} expected (world_size={self.world_size})"
            )
        if not 0 <= self.ep_rank < self.ep_size:
            raise ConfigError(
                f"ep_rank={self.ep_rank}: 0 to {self.ep_size - 1} expected (ep_size={self.ep_size})"
            )


def detect(
    *,
    run_id: str,
    rank: int | None = None,
    world_size: int | None = None,
    ep_rank: int | None = None,
    ep_size: int | None = None,
    ep_group: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> RankContext:
    """Arguments over an initialised torch.distributed over RANK / WORLD_SIZE of the launcher.

    Expert parallelism that is not said is taken as none (ep_size 1) until an adapter finds it in
    the model. A run id that nobody says is drawn when there is one rank only.

    Raises:
        ConfigError: a number that does not fit, or several ranks without a common run id.
    """
    environment = os.environ if environment is None else environment
    rank, world_size = _told("rank", rank), _told("world_size", world_size)
    ep_rank, ep_size = _told("ep_rank", ep_rank), _told("ep_size", ep_size)
    ep_group = _told("ep_group", ep_group)
    torch_rank, torch_world = _torch_ranks()
    rank = _first(rank, torch_rank, _integer(environment, "RANK"), 0)
    world_size = _first(world_size, torch_world, _integer(environment, "WORLD_SIZE"), 1)
    if not run_id:
        run_id = environment.get("TORCHELASTIC_RUN_ID", "") or environment.get("SLURM_JOB_ID", "")
    if not run_id or run_id == "none":  # torchrun's own default is the word "none"
        if world_size > 1:
            raise ConfigError(
                "run_id: not set, and ranks cannot agree on one by themselves; "
                "pass init(run_id=...) or set MOETRACE_RUN_ID to the same value on all ranks"
            )
        run_id = f"run-{uuid.uuid4().hex[:12]}"
    return RankContext(
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        ep_rank=_first(ep_rank, 0),
        ep_size=_first(ep_size, 1),
        ep_group=_first(ep_group, rank if ep_size in (None, 1) else rank - _first(ep_rank, 0)),
        host_name=socket.gethostname(),
    )


def _told(name: str, value: int | None) -> int | None:
    return None if value is None else check_whole(name, value)


def _torch_ranks() -> tuple[int | None, int | None]:
    # Never imports torch: a process that has not imported it has no process group either.
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None, None


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: a whole number expected") from None


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
