"""What the engine remembers of one run and forward mode: three bounded histories, one per question."""

from __future__ import annotations

from moetrace_collectors.verdict.gemm_fit import GemmHistory
from moetrace_collectors.verdict.history import RunHistory
from moetrace_collectors.verdict.transfer import RunTransfers


class RunMemory:
    """Histories of one run and forward mode."""

    def __init__(self) -> None:
        self.worths = RunHistory()
        """Is this more than calm steps show?"""
        self.transfers = RunTransfers()
        """Is this transfer longer than usual?"""
        self.gemms = GemmHistory()
        """Do rows explain the time?"""
