"""Transfers that have been long since a run's first steps: compared with their peers, not with calm steps.

Beside transfer.py (pure: the histories are given). A link that was slow from the start is what its own
history calls usual. What is left is to compare the usual transfers with one another::

    layer            0    1    2    3    4    5          other layers, the same bytes
    dispatch, usual  2    2    2   11    2    2    ->    layer 3 is slow                      told
    group            0    1    2    3                    other groups on as many hosts
    dispatch, usual 12   12   31   12              ->    group 2 is slow                      told
    phase        dispatch  combine                       the same rows on their way back
    usual           28        12                   ->    a slow link, or an exchange that     a doubt only
                                                         costs that on any link

Medians of many steps are compared, never single ones, only where the bytes are known, and a larger payload
may take longer in proportion. A fault in all layers, groups and phases alike has no peer: nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.verdict.frontier import GroupFrontier
from moetrace_collectors.verdict.history import MAD_TO_SIGMA
from moetrace_collectors.verdict.sequence import EXCHANGE_CODES, BoolArray
from moetrace_collectors.verdict.transfer import SPREADS, RunTransfers, layer_with_half
from moetrace_schemas.enums import PHASE_BY_CODE, Phase

TIMES = 2.0
"""So many times what its peers take must the transfers of a phase take."""
LAYER_TIMES = 3.0
"""The same for single layers: on real ranks a step's first exchanges take up to twice the others' time."""
LEAST_LAYERS = 4
"""Exchanges that differ in nothing but the layer: fewer tell no median and spread."""
LEAST_GROUPS = 3
"""Groups with the same exchanges on as many hosts, the judged one included."""
_LAYER = 0
_PHASE = 1


class Peers(StrEnum):
    """What a transfer is compared with."""

    LAYERS = "layers"
    GROUPS = "groups"
    COUNTERPART = "counterpart"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingExcess:
    """How far the usual transfers of one phase of one group exceed those of their peers."""

    peers: Peers
    ep_group: int
    phase: Phase
    layer: int | None
    excess_ns: int

    @property
    def tells_link(self) -> bool:
        """Whether a slow link is the only reading; an exchange may well cost more than its way back."""
        return self.peers is not Peers.COUNTERPART

    def sentence(self, step_ns: int) -> str:
        """What is long, by how much and against what; without an end."""
        of_layer = "" if self.layer is None else f" of layer {self.layer}"
        part = f"{self.excess_ns / step_ns:.1%} of the step"
        if self.peers is Peers.LAYERS:
            against = "those of other layers with as many bytes"
        elif self.peers is Peers.GROUPS:
            of_layer += f" in expert-parallel group {self.ep_group}"
            against = "those of the other groups with as many bytes"
        else:
            against = "the same rows on their way back"
        return (
            f"{self.phase} transfers{of_layer} are {part} longer than {against}, and usually so in this run"
        )


def standing_excesses(
    frontier: GroupFrontier, transfers: RunTransfers, num_hosts: dict[int, int], material_ns: float
) -> tuple[StandingExcess, ...]:
    """What is long in a complete group's step and in its history; at least `material_ns` each.

    `num_hosts` is the number of hosts that each group's ranks run on: a group within one host is no peer of
    one across two.
    """
    usual = transfers.usual(frontier)
    if usual is None:
        return ()
    # An exchange of counts tells no bytes of its own, and takes what it takes.
    told = (frontier.sequence.sent_bytes >= 0).all(axis=0)
    size = np.where(told, usual.size, 0.0)
    shown = np.minimum(frontier.transfer_ns, usual.transfer_ns)  # this step must show it as well
    expected = {
        Peers.LAYERS: _by_other_layers(frontier.sequence.keys, usual.transfer_ns, size),
        Peers.GROUPS: _by_other_groups(frontier, transfers, num_hosts, size),
        Peers.COUNTERPART: _by_counterpart(frontier, usual.transfer_ns),
    }
    found = []
    for code in EXCHANGE_CODES:
        for peers, figures in expected.items():
            chosen = (frontier.sequence.keys[:, _PHASE] == code) & ~np.isnan(figures)
            chosen[-1] = False
            if peers is Peers.LAYERS:
                chosen &= shown >= LAYER_TIMES * np.nan_to_num(figures)
            elif shown[chosen].sum() < TIMES * figures[chosen].sum():
                continue
            excess = shown[chosen] - figures[chosen]
            total = float(excess.sum())
            if total > 0 and total >= material_ns:
                layers = frontier.sequence.keys[chosen, _LAYER]
                found.append(
                    StandingExcess(
                        peers=peers,
                        ep_group=frontier.sequence.ep_group,
                        phase=PHASE_BY_CODE[code],
                        layer=layer_with_half(layers, excess, total),
                        excess_ns=int(total),
                    )
                )
    return tuple(found)


def _by_other_layers(keys: IntArray, usual: FloatArray, size: FloatArray) -> FloatArray:
    """[K]: what the other layers' exchanges of the same kind take, scaled to the bytes; NaN = no telling."""
    expected = np.full(len(keys), np.nan)
    _, kind = np.unique(keys[:, _PHASE:], axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    for one in np.unique(kind):
        same: BoolArray = (kind == one) & (size > 0)
        if same.sum() < LEAST_LAYERS:
            continue
        median = float(np.median(usual[same]))
        spread = MAD_TO_SIGMA * float(np.median(np.abs(usual[same] - median)))
        scaled = median * np.maximum(1.0, size[same] / np.median(size[same]))
        apart = usual[same] - scaled > SPREADS * spread
        expected[same] = np.where(apart, scaled, np.nan)
    return expected


def _by_other_groups(
    frontier: GroupFrontier, transfers: RunTransfers, num_hosts: dict[int, int], size: FloatArray
) -> FloatArray:
    """[K]: what other groups with the same exchanges take, scaled to the bytes; NaN = no telling."""
    group = frontier.sequence.ep_group
    others = [
        usual
        for other, usual in transfers.usual_of_others(frontier)
        if num_hosts.get(other) == num_hosts.get(group)
    ]
    if len(others) + 1 < LEAST_GROUPS:
        return np.full(len(size), np.nan)
    their_size = np.median([other.size for other in others], axis=0)
    known = (size > 0) & (their_size > 0)
    scale = np.where(known, np.maximum(1.0, size / np.maximum(their_size, 1.0)), np.nan)
    expected: FloatArray = np.median([other.transfer_ns for other in others], axis=0) * scale
    return expected


def _by_counterpart(frontier: GroupFrontier, usual: FloatArray) -> FloatArray:
    """[K]: what the same rows take the other way, scaled to the bytes; NaN = no telling."""
    keys, sent = frontier.sequence.keys, frontier.sequence.sent_bytes
    moved = np.where((sent >= 0).all(axis=0), sent.sum(axis=0), -1)
    dispatch, combine = EXCHANGE_CODES
    place = {tuple(key): k for k, key in enumerate(keys.tolist())}
    expected = np.full(len(keys), np.nan)
    for k, (layer, phase, *rest) in enumerate(keys.tolist()):
        other = place.get((layer, combine if phase == dispatch else dispatch, *rest))
        if phase in EXCHANGE_CODES and other is not None and moved[k] > 0 and moved[other] > 0:
            expected[k] = usual[other] * max(1.0, moved[k] / moved[other])
    return expected
