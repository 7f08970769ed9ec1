"""The terminal view fits where it is shown and obeys no control character of a name."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from moetrace_collectors.views.run_records import RunView
from moetrace_collectors.views.summarise import summarise
from moetrace_collectors.views.terminal import heat_row, print_run, time_line
from moetrace_schemas.enums import Phase
from run_view_builders import accounting, large_view, overview, run_view, step_row, suspect


def printed(
    view: RunView, *, encoding: str = "utf-8", width: int = 80, terminal: bool = False, **names: object
) -> str:
    """What a console of this encoding and width shows."""
    buffer = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(buffer, encoding=encoding),
        width=width,
        force_terminal=terminal,
        highlight=False,
        **names,  # type: ignore[arg-type]
    )
    print_run(view, summarise(view.steps), console=console, store="/runs/store", report="/runs/report.html")
    console.file.flush()
    return buffer.getvalue().decode(encoding)


def slow_rank_view() -> RunView:
    """Four steps that name rank 2."""
    return run_view(
        *(step_row(step, suspect(2, Phase.EXPERT_GEMM, layer=1, worth_ms=29.8)) for step in range(4))
    )


def test_table_shows_rank_layer_phase_cause_worth_share_and_evidence() -> None:
    """The row of the finding holds all that the verdict says."""
    row = next(line for line in printed(slow_rank_view()).splitlines() if line.startswith("   2"))
    assert " ".join(row.split()) == "2 1 expert_gemm device 29.8 ms 100 % 80 % clear in 4"


def test_lines_fit_80_columns() -> None:
    """No line of words is longer than the terminal, at the largest sizes too; paths are never wrapped."""
    view = large_view(ranks=8, layers=61, experts=256, steps=40)
    for line in printed(view).splitlines():
        assert len(line) <= 80, line


def test_ascii_where_the_encoding_is_not_utf_8() -> None:
    """On an ASCII terminal everything is printed, in ASCII."""
    text = printed(large_view(ranks=4, layers=2, experts=8, steps=4), encoding="ascii")
    assert text.isascii()
    assert "Expert load" in text


def test_no_colour_without_a_terminal() -> None:
    """A pipe gets plain text."""
    assert "\x1b" not in printed(slow_rank_view())


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR set a terminal gets no colour codes."""
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(slow_rank_view(), terminal=True)
    assert "\x1b[3" not in text
    assert "\x1b[1;3" not in text


def test_names_cannot_steer_the_terminal() -> None:
    """Escape sequences and markup in a run's or model's name are shown, not obeyed."""
    named = overview(run_id="\x1b[2Jrun[red]", model_name="a\rb")
    text = printed(run_view(step_row(0), overview=named))
    assert "\x1b" not in text
    assert "\r" not in text
    assert "?[2Jrun[red]" in text


def test_loss_is_told_only_where_something_was_lost() -> None:
    """A clean run has no accounting line; a late or missing rank has one."""
    assert "Arrived:" not in printed(slow_rank_view())
    lossy = run_view(step_row(0), accounting=accounting(late=2, missing_by_rank={3: 1}))
    assert "Arrived: 4 rank steps stored, 2 late, rank 3 missing from 1 step." in printed(lossy)


def test_rejects_of_no_run_stay_apart() -> None:
    """Requests that named no run are not counted among this run's rejects."""
    told = replace(accounting(), events={("rejected", "bad"): 2}, unattributed_rejects=5)
    assert "Arrived: 4 rank steps stored, 2 rejected. 5 rejected requests named no run." in printed(
        run_view(step_row(0), accounting=told)
    )


def test_every_run_shows_where_its_time_goes() -> None:
    """One line of shares of the critical path, longest phase first, however many phases there are."""
    assert "\ntime: expert_gemm 100 %\n" in printed(slow_rank_view())
    phases = {Phase.ROUTER: 3, Phase.OUTSIDE: 28, Phase.EXPERT_GEMM: 39, Phase.UNPERMUTE: 14}
    line = time_line({**phases, Phase.DISPATCH: 12, Phase.PERMUTE: 4})
    assert line == "time: expert_gemm 39 %, outside 28 %, unpermute 14 %, dispatch 12 %, other 7 %"
    assert len(line) <= 80
    assert time_line({}) == ""


def test_run_of_warmup_only_shows_no_median() -> None:
    """Where no step counts there is no median step and no evidence to show."""
    text = printed(run_view(step_row(0, suspect(1, Phase.ROUTER), warmup=True)))
    assert "No step outside warm-up has been joined." in text
    assert "median" not in text
    assert "evidence over" not in text


def test_heat_row_shows_the_hottest_expert_of_each_cell() -> None:
    """With more experts than characters a hot expert is not averaged away; unreported ones are blank."""
    counts = [10] * 64
    counts[5] = 100
    row = heat_row(counts, ascii_only=True, cells=32).plain
    assert len(row) == 32
    assert row[2] == "@"
    assert set(row) == {"@", "-"}
    assert heat_row([None, 5], ascii_only=True).plain == " -"
