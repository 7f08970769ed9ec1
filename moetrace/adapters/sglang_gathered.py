"""SGLang's data-parallel attention without an exchange backend: which of the gathered rows are a rank's own.

The rows of all data-parallel ranks are laid side by side before they are routed, one slot per rank, padded to
what collectives and graphs want; every rank then routes all of them. So each rank counts its own slot:

    rows = | slot of rank 0  | slot of rank 1  | ...
           | tokens  padding | padding (idle)  |

Sizes of slots are numbers of the host. Tokens in the own slot are one as well, but not while a graph is
captured: there they are on the device, where the engine keeps them for replays (with expert parallelism).
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass
from typing import Any

from moetrace.adapters.base import RouteCounter

logger = logging.getLogger("moetrace")

ATTENTION = "sglang.srt.layers.dp_attention"
CONTEXT = "sglang.srt.runtime_context"
FORWARD = "sglang.srt.model_executor.forward_context"
BATCH = "sglang.srt.model_executor.forward_batch_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the gathered rows."""

    first: int
    rows: int
    tokens: Any
    """How many of the rows are tokens; they lie before those of padding. A number, or a device's scalar."""


def not_told() -> str:
    """Why the gathered rows cannot be told apart; empty where they can."""
    attention, forward = sys.modules.get(ATTENTION), sys.modules.get(FORWARD)
    parallel = getattr(sys.modules.get(CONTEXT), "get_parallel", None)
    if (
        parallel is None
        or not callable(getattr(forward, "get_forward_context", None))
        or not all(callable(getattr(attention, n, None)) for n in ("get_dp_global_num_tokens", "dp_slot_in"))
    ):
        return (
            "ids are not counted: tokens of several ranks are gathered before they are routed, and this "
            "version does not say which are whose"
        )
    if parallel().attn_cp_size > 1:
        return (
            "ids are not counted: with context parallelism a rank's tokens do not lie in front of its padding"
        )
    return ""


def notes() -> tuple[str, ...]:
    """What the report says of a layer whose rows are gathered."""
    said = ["tokens of several ranks are gathered before they are routed: each rank counts its own"]
    if _parallel().attn_tp_rank:
        said.append("tokens of an attention's tensor-parallel group are counted by its first rank")
    enabled = getattr(sys.modules.get(BATCH), "enable_num_token_non_padded", None)
    if enabled is None or not enabled():
        said.append("in CUDA graphs not counted: the engine keeps no number of tokens for them on the device")
    return tuple(said)


def add_own(counter: RouteCounter, index: int, ids: Any) -> None:
    """Count what ids [rows, K] of the gathered rows hold of this rank's, padding apart."""
    share = own_share(int(ids.shape[0]), capturing=_is_capturing(ids))
    if share is None:
        return
    own = ids[share.first : share.first + share.rows]
    if isinstance(share.tokens, int) and share.tokens >= share.rows:
        counter.add(index, own)
        return
    import torch

    counter.add(index, own, padding=torch.arange(share.rows, device=ids.device) >= share.tokens)


def own_share(rows: int, *, capturing: bool) -> Share | None:
    """The part of all `rows` that is this rank's; None where others count it, or the engine does not say."""
    attention: Any = sys.modules[ATTENTION]
    sizes, batch = attention.get_dp_global_num_tokens(), _batch()
    if batch is None or sizes is None or sum(sizes) != rows:
        _say_unknown()
        return None
    slot, parallel = attention.dp_slot_in(sizes), _parallel()
    first, size = sum(sizes[:slot]), int(sizes[slot])
    if not capturing and batch.global_num_token_non_padded_cpu is not None:
        if parallel.attn_tp_rank:
            return None
        return Share(first=first, rows=size, tokens=int(batch.global_num_token_non_padded_cpu))
    if batch.num_token_non_padded is None:
        return None
    if batch.attn_tp_sequence_sharded:
        # Each rank of the attention's group is told of the tokens in its own piece of the slot.
        size //= parallel.attn_tp_size
        first += size * parallel.attn_tp_rank
    elif parallel.attn_tp_rank:
        return None
    return Share(first=first, rows=size, tokens=batch.num_token_non_padded)


@functools.cache
def _say_unknown() -> None:
    logger.warning(
        "moetrace: SGLang routes tokens of several ranks in a call that is none of its forwards: "
        "it does not say whose they are, so that they are not counted there"
    )


def _batch() -> Any | None:
    """The running ForwardBatch: of a half, where a batch runs in two."""
    context: Any = sys.modules[FORWARD]
    if not context.has_forward_context():
        return None
    # The engine lends routing a method of the batch, and not the batch.
    return getattr(context.get_forward_context().moe_num_token_non_padded, "__self__", None)


def _parallel() -> Any:
    return sys.modules[CONTEXT].get_parallel()


def _is_capturing(ids: Any) -> bool:
    import torch

    return bool(ids.is_cuda and torch.cuda.is_current_stream_capturing())
