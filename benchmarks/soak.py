"""Soak: a collector at half its top rate for so many minutes; memory must not grow.

The top rate is measured first for a few seconds. Prints memory once every ten seconds and, at the end, means
of every two minutes and the slope of a straight line through the second half, of all resident memory and of
what the embedded engine has allocated and not freed. The engine's share jumps by some hundred MiB with the
merges of the moment; what only the first grows by is memory that allocators keep.

    python benchmarks/soak.py --minutes 20 [--ranks 64] [--write]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
from collector_under_load import Collector, body, collector, numbered, post_all, rank_steps
from results import write_section

PROBE_STEPS = 40
SAMPLE_S = 10.0
WINDOW_S = 120.0
ALLOCATED = "SELECT sum(size * (allocations - deallocations)) FROM system.jemalloc_bins"


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


def engine_mib(running: Collector) -> float:
    """What the embedded engine has allocated and not freed."""
    url = f"http://127.0.0.1:{running.port}/?query={urllib.parse.quote(ALLOCATED)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.read()) / 2**20


def slope(times_s: np.ndarray, values: np.ndarray) -> float:
    """Of a straight line, per minute."""
    return float(np.polyfit(times_s / 60, values, 1)[0]) if len(times_s) > 1 else float("nan")


def by_window(times_s: np.ndarray, values: np.ndarray) -> str:
    """Means of every two minutes, MiB."""
    windows = (times_s // WINDOW_S).astype(int)
    return ", ".join(f"{values[windows == window].mean():.0f}" for window in np.unique(windows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a collector at half its top rate.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    steps = rank_steps(num_ranks=arguments.ranks, with_counts=False)
    with tempfile.TemporaryDirectory() as name, collector(Path(name)) as running:
        rate = top_rate(running, arguments.ranks) / 2
        samples: list[tuple[float, float, float]] = []
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
                samples.append((now - begin, running.memory_kib("VmRSS") / 1024, engine_mib(running)))
                wal = running.metrics()[("moetrace_collector_wal_bytes", "")] / 2**20
                print(
                    f"{now - begin:6.0f} s: {samples[-1][1]:.0f} MiB, engine {samples[-1][2]:.0f} MiB, "
                    f"log {wal:.0f} MiB, {sent} steps",
                    flush=True,
                )
        behind = sum(v for (n, _), v in running.metrics().items() if n == "moetrace_collector_pending")
    every = np.array(samples).T
    times, memory, engine = every[:, every.shape[1] // 2 :]
    middle = len(times) // 2
    sent_rate = sent / (60 * arguments.minutes)
    text = (
        f"{arguments.minutes:g} minutes at {rate:.1f} steps/s (half the rate measured at the start), "
        f"{arguments.ranks} ranks: {sent} steps ({sent_rate:.1f} a second were sent); "
        f"memory in the second half {memory.min():.0f} to "
        f"{memory.max():.0f} MiB, slope {slope(times, memory):+.2f} MiB a minute (in the last quarter "
        f"{slope(times[middle:], memory[middle:]):+.2f}); of it allocated by the engine {engine.min():.0f} "
        f"to {engine.max():.0f} MiB, slope {slope(times, engine):+.2f}; {behind:.0f} pending at the end. "
        f"Means of every two minutes: resident {by_window(every[0], every[1])} MiB; of it allocated by the "
        f"engine {by_window(every[0], every[2])} MiB. "
        f"`python benchmarks/soak.py --minutes {arguments.minutes:g} --ranks {arguments.ranks} --write`."
    )
    print(text)
    if arguments.write:
        write_section("soak", "Memory of the collector over time", text)


if __name__ == "__main__":
    main()
