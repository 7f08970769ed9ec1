"""From a recorded run to a recommendation in one command: whether to move or replicate experts.

    python examples/recommend_placement.py moetrace-runs/demo
    python examples/recommend_placement.py tests/data/loads/esft_law_counts.json --ranks 8 --slots 72

The same as `moetrace replay --dir DIR` or `moetrace replay FILE`, in the few calls that it consists of.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from moetrace_collectors.load.series import LoadSeries, series_of_recording
from moetrace_collectors.load.store_source import read_series
from moetrace_collectors.offline.load_dumps import read_load_dump
from moetrace_collectors.placement.alternatives import alternatives
from moetrace_collectors.placement.case import ReplayRequest, make_case
from moetrace_collectors.placement.planners import PLANNERS
from moetrace_collectors.placement.recommendation import recommend
from moetrace_collectors.placement.replay import replay_planner
from moetrace_collectors.run_directory import open_run_directory
from moetrace_collectors.views.store_reader import choose_run
from moetrace_collectors.views.store_rows import store_of_directory


def recorded(path: Path) -> LoadSeries:
    """The loads with most pairs of a run directory, or of a dump."""
    if path.is_file():
        return series_of_recording(read_load_dump(path))[0]
    with store_of_directory(open_run_directory(path)) as store:
        return read_series(store, choose_run(store))[0]


def main() -> None:
    """Read, replay, recommend."""
    parser = argparse.ArgumentParser(description="Is it worth moving or replicating experts?")
    parser.add_argument("path", type=Path, help="run directory or load dump")
    parser.add_argument("--ranks", type=int, help="ranks of an expert-parallel group (default: as recorded)")
    parser.add_argument("--slots", type=int, help="physical experts (default: as many as experts)")
    arguments = parser.parse_args()

    request = ReplayRequest(num_ranks=arguments.ranks, num_slots=arguments.slots)
    case, assumptions, _ = make_case(recorded(arguments.path), request, clock=time.monotonic)
    results = [replay_planner(case, planner) for planner in PLANNERS]
    for result in results:
        held_out = f"{result.held_out.balancedness:.3f}" if result.held_out else "-"
        print(
            f"{result.planner:12} balanced {result.balancedness:.3f}, held out {held_out}, "
            f"saves {result.saved:.1%}"
        )
    print(recommend(case, alternatives(case, results)).sentence)
    for assumption in assumptions:
        print(f"assumed: {assumption}")


if __name__ == "__main__":
    main()
