"""A frame of the live view: what it names, and that it fits every terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from moetrace_collectors.commands.top_live import follow
from moetrace_collectors.views.collector_counters import health_line, is_troubled, parse_counters
from moetrace_collectors.views.recent_records import CollectorCounters, RecentRun
from moetrace_collectors.views.run_records import RankPhaseExtension
from moetrace_collectors.views.top_screen import KEYS, Frame, render, row_budget, step_line
from moetrace_schemas.enums import Cause, Evidence, Phase
from run_view_builders import MS, large_view, step_row, suspect

METRICS = """\
# TYPE moetrace_collector_received_total counter
moetrace_collector_received_total 12.0
# TYPE moetrace_collector_joined_total counter
moetrace_collector_joined_total 8.0
# TYPE moetrace_collector_rejected_total counter
moetrace_collector_rejected_total{reason="malformed_columns"} 1.0
moetrace_collector_rejected_total{reason="body_too_large"} 2.0
# TYPE moetrace_collector_pending gauge
moetrace_collector_pending 1.0
# TYPE moetrace_collector_verdict_latency_seconds histogram
moetrace_collector_verdict_latency_seconds_bucket{le="0.01"} 98.0
moetrace_collector_verdict_latency_seconds_bucket{le="0.05"} 99.0
moetrace_collector_verdict_latency_seconds_bucket{le="+Inf"} 100.0
moetrace_collector_verdict_latency_seconds_count 100.0
moetrace_collector_verdict_latency_seconds_sum 1.0
"""


def shown(
    run: RecentRun | None,
    *,
    width: int = 80,
    height: int = 200,
    encoding: str = "utf-8",
    terminal: bool = False,
    keys: str = "",
    health: str = "fine",
) -> str:
    """A frame as a console of this size and encoding shows it."""
    buffer = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(buffer, encoding=encoding),
        width=width,
        height=height,
        force_terminal=terminal,
        highlight=False,
    )
    frame = Frame(run=run, source="http://127.0.0.1:4318", health=health, troubled=False)
    console.print(render(frame, console, height=height, keys=keys))
    console.file.flush()
    return buffer.getvalue().decode(encoding)


def slow_rank(steps: int = 4) -> RecentRun:
    """Steps that name rank 2 in the experts of layer 1, worth 30 ms each of 100; rank 0 adds 10 ms."""
    return RecentRun(
        run_id="run",
        steps=tuple(
            step_row(step, suspect(2, Phase.EXPERT_GEMM, layer=1, worth_ms=30), cause=Cause.DEVICE)
            for step in range(steps)
        ),
        extensions=(
            RankPhaseExtension(rank=0, phase=Phase.OUTSIDE, extension_ns=10 * MS * steps, ambiguous_ns=0),
            RankPhaseExtension(
                rank=2, phase=Phase.EXPERT_GEMM, extension_ns=15 * MS * steps, ambiguous_ns=15 * MS * steps
            ),
        ),
        imbalance=(),
        expert_loads=(),
        load_steps=0,
    )


def large() -> RecentRun:
    """61 layers of 256 experts, 64 ranks that all extend steps."""
    view = large_view(ranks=64, layers=61, experts=256, steps=60)
    return RecentRun(
        run_id=view.overview.run_id,
        steps=view.steps,
        extensions=tuple(
            RankPhaseExtension(rank=rank, phase=Phase.ROUTER, extension_ns=(rank + 1) * MS, ambiguous_ns=0)
            for rank in range(64)
        ),
        imbalance=view.imbalance,
        expert_loads=view.expert_loads,
        load_steps=8,
    )


def test_frame_names_rank_phase_worth_cause_and_evidence() -> None:
    """The headline, the newest step first, and the shares say what the verdicts say."""
    text = shown(slow_rank())
    sentence = "Rank 2 in expert_gemm (mostly layer 1) extended 100 % of steps by a median 30.0 ms"
    assert sentence in " ".join(text.split())
    assert "evidence: clear 100 %" in text
    assert "causes of the 4 named steps: device 100 %" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "3 prefill 100 ms clear 2 1 expert_gemm device 30.0 ms" in rows
    steps = [row for row in rows if "expert_gemm device 30.0 ms" in row]
    assert [row.split()[0] for row in steps] == ["3", "2", "1", "0"]


def test_bars_are_of_extension_per_step_costliest_first() -> None:
    """30 ms a step, half of it doubtful, is a full bar; 10 ms is a third of it."""
    lines = [line.split() for line in shown(slow_rank()).splitlines()]
    bars = [line for line in lines if line[-1:] in (["expert_gemm"], ["outside"])]
    assert bars == [
        ["2", "\u2588" * 12 + "\u2592" * 12, "30.0", "ms", "expert_gemm"],
        ["0", "\u2588" * 8, "10.0", "ms", "outside"],
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 60), (20, 5)])
def test_frame_fits_the_terminal(width: int, height: int) -> None:
    """No line is longer than the terminal is wide; from 12 lines on nothing is cut off at the bottom."""
    lines = shown(large(), width=width, height=height, keys=KEYS).splitlines()
    assert all(len(line) <= width for line in lines)
    if height >= 24:
        assert len(lines) <= height
        assert lines[-1].startswith(KEYS)


def test_room_is_shared_and_what_one_table_leaves_goes_to_the_others() -> None:
    """Tables take turns; a short one gives its lines to the rest; nothing is shown beyond what there is."""
    budget = row_budget(9 + 3 * 2 + 10, steps=50, ranks=2, layers=50)
    assert (budget.steps, budget.ranks, budget.layers) == (4, 2, 4)
    roomy = row_budget(1000, steps=3, ranks=2, layers=0)
    assert (roomy.steps, roomy.ranks, roomy.layers) == (3, 2, 0)
    assert row_budget(3, steps=5, ranks=5, layers=5).steps == 0


def test_uneven_layers_come_with_their_heat_row() -> None:
    """Each layer shown has max/mean, its hottest expert, and one character per group of experts."""
    text = shown(large(), height=60)
    assert "experts 0 to 255, last 8 steps" in text
    assert "max/mean" in text


def test_ascii_and_plain_where_the_output_is_neither_utf_8_nor_a_terminal() -> None:
    """A pipe with an ASCII encoding gets ASCII without escape sequences."""
    for width in (20, 40, 80):
        assert shown(large(), encoding="ascii", width=width, keys=KEYS).isascii()
    text = shown(large(), encoding="ascii")
    assert "\x1b" not in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR set a terminal gets no colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown(slow_rank(), terminal=True)


def test_names_cannot_steer_the_terminal() -> None:
    """Escape sequences in a run id or in what a collector answers are shown, not obeyed."""
    hostile = replace(slow_rank(), run_id="\x1b[2Jrun")
    text = shown(hostile, health="no \x1b[2J answer")
    assert "\x1b" not in text
    assert "?[2Jrun" in text


def test_nothing_joined_yet_says_what_is_awaited() -> None:
    """A collector without steps is no error: the frame says when a step is joined."""
    text = " ".join(shown(None).split())
    assert "Nothing has been joined yet: a step is joined when its last rank arrives" in text


def test_step_lines_are_for_grep() -> None:
    """One line per step, with what is named, and ranks that are missing."""
    named = step_row(7, suspect(1, Phase.DISPATCH, worth_ms=2), cause=Cause.LINK)
    assert step_line(named) == (
        "step 7, prefill, 100 ms, clear, rank 1, dispatch, no single layer, cause link, worth 2.00 ms"
    )
    partial = step_row(8, evidence=Evidence.INSUFFICIENT, missing_ranks=(3,), warmup=True)
    assert step_line(partial) == "step 8, prefill, 100 ms, insufficient (warm-up), 1 rank missing"


def test_counters_are_read_from_what_prometheus_scrapes() -> None:
    """Labels are summed, what is not there is 0, p99 is the bound of its bucket."""
    counters = parse_counters(METRICS, read_monotonic_s=5.0)
    assert (counters.received, counters.joined, counters.rejected, counters.late) == (12, 8, 3, 0)
    assert counters.verdict_p99_s == 0.05
    with pytest.raises(ValueError, match="no metrics of a collector"):
        parse_counters("# TYPE up gauge\nup 1\n", read_monotonic_s=0.0)


def counters(**values: int) -> CollectorCounters:
    """Counters of a collector to which nothing happened but this."""
    nothing = dict.fromkeys(
        (
            "received", "joined", "late", "duplicate", "rejected", "pending", "throttled", "lost_rows",
            "sink_errors",
        ),
        0,
    )  # fmt: skip
    seconds = values.pop("at", 0)
    return CollectorCounters(read_monotonic_s=float(seconds), verdict_p99_s=None, **{**nothing, **values})


def test_health_tells_rate_and_losses() -> None:
    """Arrivals per second come from two readings; zero losses are not mentioned, others are."""
    before, now = counters(received=100, at=10), counters(received=120, joined=118, lost_rows=3, at=15)
    assert health_line(now, before) == "120 rank steps received (4.0/s), 118 joined, 0 pending, 3 rows lost"
    assert is_troubled(now, before)
    assert not is_troubled(now, now)
    assert is_troubled(now, None)
    # A restarted collector counts from zero: no negative rate.
    assert "(0.0/s)" in health_line(counters(received=1, at=20), now)


def test_lines_come_once_per_step_and_complaints_once_per_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Windows of steps overlap from frame to frame; what is wrong goes to stderr, once."""
    run = slow_rank(6)

    def frame(first: int, last: int, *, run_id: str = "run", trouble: str = "") -> Frame:
        window = replace(run, run_id=run_id, steps=run.steps[first : last + 1])
        return Frame(run=window, source="s", health=trouble or "fine", troubled=bool(trouble))

    later = iter(
        [
            frame(1, 3),
            frame(1, 3, trouble="away"),
            frame(1, 3, trouble="away"),
            frame(2, 5),
            frame(0, 0, run_id="next"),
        ]
    )

    def read() -> Frame:
        try:
            return next(later)
        except StopIteration:
            raise KeyboardInterrupt from None

    follow(read, frame(0, 2), interval_s=0)
    said = capsys.readouterr()
    lines = [line.split(",")[0] for line in said.out.splitlines()]
    assert lines == ["run run", *(f"step {step}" for step in range(6)), "run next", "step 0"]
    assert said.err == "collector: away\n"
