"""Verdict: which rank, in which layer and phase, extended the step, by how much, and why. Pure, clock-free.

::

    JoinedStep -> sequence -> frontier -> attribution -> evidence -> cause -> StepVerdict
                  rows to     waits and   sums by        stands out
                  exchanges   extensions  (rank, phase)  of history?
"""

from __future__ import annotations

from moetrace_collectors.verdict.engine import VerdictEngine

__all__ = ["VerdictEngine"]
