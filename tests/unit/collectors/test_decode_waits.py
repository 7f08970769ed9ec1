"""Waits of exchange kernels on the wire: one row of the matrix per rank and phase, and what is no row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moetrace_collectors.decode import decode
from moetrace_collectors.model import WaitCycles
from moetrace_collectors.sinks.clickhouse_rows import TableRows, rank_step_rows
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_schemas.enums import PHASE_CODE, Phase, RejectReason

RUN = SyntheticRun(world_size=4, num_layers=3, num_experts=8)


def test_waits_of_kernels_survive_the_wire() -> None:
    """One row of the matrix per phase, in cycles that no count of tokens reaches."""
    waits = tuple(
        WaitCycles(phase=PHASE_CODE[phase], cycles=np.array([0, 7, 2**50, 9]))
        for phase in (Phase.DISPATCH, Phase.COMBINE)
    )
    sent = dataclasses.replace(RUN.step(5)[1], waits=waits)
    (got,) = decode(request([sent]), max_world_size=1024).rank_steps
    assert [(entry.phase, entry.cycles.tolist()) for entry in got.waits] == [
        (entry.phase, [0, 7, 2**50, 9]) for entry in waits
    ]
    (table,) = [
        table
        for table in rank_step_rows([got], late=False, received_unix_ms=0)
        if table.table == "rank_waits"
    ]
    assert isinstance(table, TableRows)
    columns = dict(zip(table.names, table.columns, strict=True))
    assert columns["waited_for"] == [0, 1, 2, 3] * 2
    assert columns["cycles"] == [0, 7, 2**50, 9] * 2
    assert set(columns["ep_rank"]) == {1}
    assert columns["phase"] == ["dispatch"] * 4 + ["combine"] * 4


@pytest.mark.parametrize(
    ("phases", "cycles", "message"),
    [
        ([Phase.DISPATCH], [1, 2, 3], "one value per expert-parallel rank (4) expected, got 3"),
        ([Phase.DISPATCH], [1, 2, 3, -1], "values"),
        ([Phase.DISPATCH], [2**53, 2**53, 0, 0], "values"),
        ([Phase.ROUTER], [1, 2, 3, 4], "dispatch and combine expected, each once"),
        ([Phase.COMBINE, Phase.COMBINE], [1, 2, 3, 4], "dispatch and combine expected, each once"),
    ],
)
def test_waits_that_cannot_be_are_refused(phases: list[Phase], cycles: list[int], message: str) -> None:
    """Each with what was expected; the matrix is of the expert-parallel group."""
    waits = tuple(WaitCycles(phase=PHASE_CODE[phase], cycles=np.array(cycles)) for phase in phases)
    decoded = decode(request([dataclasses.replace(RUN.step(5)[1], waits=waits)]), max_world_size=1024)
    assert decoded.rank_steps == ()
    (rejected,) = decoded.rejected
    assert rejected.reason is RejectReason.MALFORMED_COLUMNS
    assert message in rejected.detail
