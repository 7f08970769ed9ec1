"""One frame of the live view: who extends the newest steps, by how much, and how even the experts are. Pure.

What is shown shrinks with the terminal: the newest steps, the ranks that cost most and the most uneven
layers stay. Where the output's encoding is not UTF-8 everything is ASCII.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console, Group, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from moetrace_collectors.number_format import count, duration_text, length_text, percent, plain
from moetrace_collectors.views.findings import Summary
from moetrace_collectors.views.headline import layer_name
from moetrace_collectors.views.recent_records import RecentRun
from moetrace_collectors.views.run_records import LayerImbalance, LoadMatrix, StepRow
from moetrace_collectors.views.summarise import summarise
from moetrace_collectors.views.terminal import EVIDENCE_STYLES, heat_row
from moetrace_schemas.enums import Cause, Evidence, Phase

WAITING = "Nothing has been joined yet: a step is joined when its last rank arrives or its window passes."
KEYS = "q quits"
BAR_CELLS = 24
FIXED_LINES = 9
"""Title, two of headline, three of shares, the collector's two, and one of room."""
TABLE_LINES = 2
"""A table's headings and the blank line before it."""
PLENTY = 200
"""Lines of a frame that is printed and not fitted to a screen."""
MOST_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What one frame shows."""

    run: RecentRun | None
    """None before the first joined step."""
    source: str
    """Where it comes from: a path, a DSN without its password, or a URL."""
    health: str
    """The collector in a sentence."""
    troubled: bool
    """Whether that sentence is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """Rows of each table."""

    steps: int
    ranks: int
    layers: int


def render(frame: Frame, console: Console, *, height: int = PLENTY, keys: str = "") -> RenderableType:
    """The frame for a console of this many lines."""
    cut: OverflowMethod = "crop" if _is_ascii(console) else "ellipsis"
    parts: list[RenderableType] = [_title(frame, cut)]
    if frame.run is None or not frame.run.steps:
        parts.append(Text(WAITING))
    else:
        parts += _body(frame.run, console, height)
    parts += [Text(), Text(f"collector: {plain(frame.health)}", style="yellow" if frame.troubled else "dim")]
    if keys:
        parts.append(Text(f"{keys}; {plain(frame.source)}", style="dim", no_wrap=True, overflow=cut))
    return Group(*parts)


def row_budget(height: int, *, steps: int, ranks: int, layers: int) -> RowBudget:
    """Rows of each table in `height` lines: a fair part each, and what one leaves goes to the others."""
    wanted = {"steps": steps, "ranks": ranks, "layers": layers}
    given = dict.fromkeys(wanted, 0)
    tables = sum(1 for rows in wanted.values() if rows)
    left = height - FIXED_LINES - TABLE_LINES * tables
    while left > 0:
        hungry = [name for name in wanted if given[name] < min(wanted[name], MOST_ROWS)]
        if not hungry:
            break
        for name in hungry[:left]:
            given[name] += 1
        left -= len(hungry[:left])
    return RowBudget(**given)


def step_line(row: StepRow) -> str:
    """One step as a line of plain text, for output that is no terminal."""
    words = [
        f"step {row.step}",
        str(row.forward_mode),
        length_text(row.step_ns),
        str(row.evidence) + (" (warm-up)" if row.warmup else ""),
    ]
    suspect = row.suspect
    if suspect is not None:
        words += [
            f"rank {suspect.rank}",
            str(suspect.phase),
            layer_name(suspect.layer),
            f"cause {row.cause}",
            f"worth {duration_text(suspect.worth_ns)}",
        ]
    if row.missing_ranks:
        words.append(count(len(row.missing_ranks), "rank") + " missing")
    return ", ".join(words)


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _title(frame: Frame, cut: OverflowMethod) -> Text:
    title = Text("moetrace ", style="bold", no_wrap=True, overflow=cut)
    if frame.run is None or not frame.run.steps:
        return title.append(plain(frame.source), style="dim")
    run = frame.run
    newest = datetime.fromtimestamp(run.steps[-1].start_unix_ns / 1e9, tz=UTC)
    modes = "/".join(sorted({str(row.forward_mode) for row in run.steps}))
    title.append(plain(run.run_id), style="bold cyan")
    return title.append(
        f"  {count(run.world_size, 'rank')}, {modes}, last {count(len(run.steps), 'joined step')}, "
        f"newest {run.steps[-1].step} at {newest:%H:%M:%S} UTC",
        style="dim",
    )


def _body(run: RecentRun, console: Console, height: int) -> list[RenderableType]:
    ascii_only = _is_ascii(console)
    summary = summarise(run.steps, goes_on=True)
    whole = [layer for layer in run.imbalance if layer.view.cohort is None]
    ranks = _by_rank(run)
    budget = row_budget(height, steps=len(run.steps), ranks=len(ranks), layers=len(whole))
    parts: list[RenderableType] = [Text(summary.headline, style="bold"), *_shares(run, summary)]
    if budget.steps:
        parts += [Text(), _steps_table(run.steps[: -budget.steps - 1 : -1])]
    if budget.ranks:
        counted = max(1, summary.counted_steps)
        parts += [Text(), _ranks_table(ranks, budget.ranks, counted, ascii_only=ascii_only)]
    if budget.layers:
        parts += [Text(), _layers_table(run, whole, budget.layers, ascii_only=ascii_only)]
    return parts


def _shares(run: RecentRun, summary: Summary) -> list[Text]:
    counted = summary.counted_steps
    if not counted:
        return []
    evidence = ", ".join(
        f"{member} {percent(number / counted)}" for member, number in summary.evidence.items() if number
    )
    lines = [
        Text(f"figures: {summary.counted.sentence()}", style="dim"),
        Text(
            f"median step {length_text(summary.step_median_ns)}, p95 {length_text(summary.step_p95_ns)}; "
            f"evidence: {evidence}"
        ),
    ]
    causes: Counter[Cause] = Counter(
        row.cause
        for row in run.steps
        if not row.warmup and row.suspect is not None and row.evidence is not Evidence.INSUFFICIENT
    )
    if causes:
        named = sum(causes.values())
        mix = ", ".join(f"{cause} {percent(number / named)}" for cause, number in causes.most_common())
        lines.append(Text(f"causes of the {count(named, 'named step')}: {mix}"))
    return lines


def _steps_table(newest_first: Sequence[StepRow]) -> Table:
    table = _table(
        ("step", "right"),
        ("mode", "left"),
        ("length", "right"),
        ("evidence", "left"),
        ("rank", "right"),
        ("layer", "right"),
        ("phase", "left"),
        ("cause", "left"),
        ("worth", "right"),
    )
    for row in newest_first:
        suspect = row.suspect
        evidence = Text("warm-up" if row.warmup else str(row.evidence), style=EVIDENCE_STYLES[row.evidence])
        named = (
            ("-", "-", "-", "-", "-")
            if suspect is None
            else (
                str(suspect.rank),
                "all" if suspect.layer is None else str(suspect.layer),
                str(suspect.phase),
                str(row.cause),
                duration_text(suspect.worth_ns),
            )
        )
        table.add_row(str(row.step), str(row.forward_mode), length_text(row.step_ns), evidence, *named)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankCost:
    rank: int
    extension_ns: int
    """Where waits and work agree."""
    ambiguous_ns: int
    phase: Phase
    """The phase with most of it."""

    @property
    def total_ns(self) -> int:
        return self.extension_ns + self.ambiguous_ns


def _by_rank(run: RecentRun) -> list[_RankCost]:
    """Costliest first; ranks that extended nothing are left out."""
    by_rank: dict[int, dict[Phase, tuple[int, int]]] = defaultdict(dict)
    for item in run.extensions:
        if item.extension_ns or item.ambiguous_ns:
            by_rank[item.rank][item.phase] = (item.extension_ns, item.ambiguous_ns)
    costs = [
        _RankCost(
            rank=rank,
            extension_ns=sum(agreed for agreed, _ in phases.values()),
            ambiguous_ns=sum(doubtful for _, doubtful in phases.values()),
            phase=max(phases, key=lambda phase: (sum(phases[phase]), str(phase))),
        )
        for rank, phases in by_rank.items()
    ]
    return sorted(costs, key=lambda cost: (-cost.total_ns, cost.rank))


def _ranks_table(costs: Sequence[_RankCost], rows: int, counted: int, *, ascii_only: bool) -> Table:
    table = _table(
        ("rank", "right"), ("extension per step", "left"), ("", "right"), ("most of it in", "left")
    )
    largest = costs[0].total_ns
    for cost in costs[:rows]:
        table.add_row(
            str(cost.rank),
            _bar(cost, largest, ascii_only=ascii_only),
            duration_text(cost.total_ns / counted),
            str(cost.phase),
        )
    return table


def _bar(cost: _RankCost, largest_ns: int, *, ascii_only: bool) -> Text:
    full, doubtful, trace = ("#", "?", ".") if ascii_only else ("\u2588", "\u2592", "\u258f")
    cells = round(BAR_CELLS * cost.total_ns / largest_ns)
    if not cells:
        return Text(trace, style="dim")
    sure = round(cells * cost.extension_ns / cost.total_ns)
    bar = Text(full * sure, style="green")
    return bar.append(doubtful * (cells - sure), style="yellow")


def _layers_table(run: RecentRun, layers: Sequence[LayerImbalance], rows: int, *, ascii_only: bool) -> Table:
    worst = sorted(layers, key=lambda layer: (-layer.max_mean_ratio, layer.layer))[:rows]
    listed = sorted(worst, key=lambda layer: (str(layer.view.forward_mode), layer.layer))
    columns = max((len(matrix.columns) for matrix in run.expert_loads), default=0)
    several = len({layer.view for layer in layers}) > 1
    heading = f"experts 0 to {columns - 1}, last {count(run.load_steps, 'step')}"
    table = _table(
        *((("mode", "left"),) if several else ()),
        ("layer", "right"),
        ("max/mean", "right"),
        ("hot", "right"),
        (heading, "left"),
    )
    for layer in listed:
        matrix = _matrix_of(run, layer)
        table.add_row(
            *((str(layer.view.forward_mode),) if several else ()),
            str(layer.layer),
            f"{layer.max_mean_ratio:.2f}",
            str(layer.hot_expert),
            heat_row(matrix.counts[matrix.layers.index(layer.layer)], ascii_only=ascii_only),
        )
    return table


def _matrix_of(run: RecentRun, layer: LayerImbalance) -> LoadMatrix:
    return next(matrix for matrix in run.expert_loads if matrix.view == layer.view)


def _table(*columns: tuple[str, JustifyMethod]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="crop")
    return table
