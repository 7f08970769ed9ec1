"""The join over the store: reads the rank rows that stateless collectors wrote, judges, writes verdicts.

::

    collect --join=store (any number) -> rank_steps, phase_spans, expert_loads, unfolded_expert_loads
                                            |  lease.py        which of several joins is at work
                                            |  step_finder.py  steps with new rows, by rank_step_arrivals
                                            |  executions.py   run ids used again, or by two jobs
                                            |  closed_steps.py which are whole or have waited enough
                                            |  rank_rows.py    rows -> RankStep, as from the wire
                                            |  folding.py      counts by slot -> counts by expert
                                            v
              the same VerdictEngine and ledger -> step_verdicts, step_barriers, placement_ledger
"""

from __future__ import annotations
