"""The join over the store: reads the rank rows that stateless collectors wrote, judges, writes verdicts.

::

    collect --join=store (any number) -> rank_steps, phase_spans, expert_loads
                                            |  closed_steps.py   which steps are whole or have waited enough
                                            |  rank_rows.py      rows -> RankStep, as from the wire
                                            v
                                         the same VerdictEngine -> step_verdicts, step_barriers
"""

from __future__ import annotations
