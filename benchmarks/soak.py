"""Soak: a collector at half its top rate for so many minutes; memory must not grow.

The top rate is measured first for a few seconds. Prints memory once every ten seconds and, at the end, the
slope of a straight line through the second half of them, with what the log and the store hold.

    python benchmarks/soak.py --minutes 20 [--ranks 64] [--write]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from collector_under_load import Collector, body, collector, numbered, post_all, rank_steps
from results import write_section

PROBE_STEPS = 40
SAMPLE_S = 10.0


def top_rate(running: Collector, ranks: int) -> float:
    """Steps per second, from first byte to last row."""
    steps = rank_steps(num_ranks=ranks, with_counts=False)
    rows = sum(len(one.phases) for one in steps) * PROBE_STEPS
    bodies = [body(numbered(steps, step, "probe"), compressed=True) for step in range(PROBE_STEPS)]
    start = time.perf_counter()
    post_all(running.port, bodies, compressed=True)
    while running.stored_phase_rows() < rows:
        time.sleep(0.05)
    return PROBE_STEPS / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a collector at half its top rate.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    steps = rank_steps(num_ranks=arguments.ranks, with_counts=False)
    with tempfile.TemporaryDirectory() as name, collector(Path(name)) as running:
        rate = top_rate(running, arguments.ranks) / 2
        samples: list[tuple[float, float]] = []
        begin = last = time.perf_counter()
        sent = 0
        while (now := time.perf_counter()) - begin < 60 * arguments.minutes:
            due = int((now - begin) * rate) + 1
            if sent < due:
                # Serialised here and not before: a soak must not hold minutes of requests in memory.
                post_all(
                    running.port, [body(numbered(steps, sent), compressed=True)], compressed=True, threads=1
                )
                sent += 1
            else:
                time.sleep(0.005)
            if now - last >= SAMPLE_S:
                last = now
                samples.append((now - begin, running.memory_kib("VmRSS") / 1024))
                wal = running.metrics()[("moetrace_collector_wal_bytes", "")] / 2**20
                print(
                    f"{now - begin:6.0f} s: {samples[-1][1]:.0f} MiB, log {wal:.0f} MiB, {sent} steps",
                    flush=True,
                )
        behind = sum(v for (n, _), v in running.metrics().items() if n == "moetrace_collector_pending")
    times, memory = np.array(samples[len(samples) // 2 :]).T
    slope = np.polyfit(times / 60, memory, 1)[0] if len(times) > 1 else float("nan")
    sent_rate = sent / (60 * arguments.minutes)
    text = (
        f"{arguments.minutes:g} minutes at {rate:.1f} steps/s (half the rate measured at the start), "
        f"{arguments.ranks} ranks: {sent} steps ({sent_rate:.1f} a second were sent); "
        f"memory in the second half {memory.min():.0f} to "
        f"{memory.max():.0f} MiB, slope {slope:+.2f} MiB a minute; {behind:.0f} pending at the end. "
        f"`python benchmarks/soak.py --minutes {arguments.minutes:g} --ranks {arguments.ranks} --write`."
    )
    print(text)
    if arguments.write:
        write_section("soak", "Memory of the collector over time", text)


if __name__ == "__main__":
    main()
