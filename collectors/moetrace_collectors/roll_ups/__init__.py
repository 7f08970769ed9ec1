"""Roll-ups by minute: sums over rank rows and exchanges that keep a month of heat map cheap.

::

    rank_steps, step_verdicts    which minutes have more than is rolled up   queries.py, minutes.py
          |  quiet for a while, or waited long enough
          v
    INSERT .. SELECT from expert_loads, phase_spans, step_barriers FINAL     roll_up.py
          |
          v
    *_minute_rows, of which the result from most rows stays; rolled_up_minutes

Nothing is added up as rows arrive, so a row that is delivered again is summed once: the tables drop repeats,
and a minute is summed from the tables. schemas/decisions/0014 says why so.
"""

from __future__ import annotations
