"""Files -> one result: read, recognise, join, judge. The only module that knows all stages of `analyze`.

Nothing is claimed that the files do not hold: one rank alone has no critical rank, a trace without a known
name has no MoE phase, ranks that are missing make verdicts partial, and what was assumed is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moetrace_collectors.align import ClockFit
from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import JoinedStep, RankStep, StepVerdict
from moetrace_collectors.offline import duration_arrays, own_steps
from moetrace_collectors.offline.collectives import (
    CollectiveJoin,
    JoinedCollective,
    join_collectives,
    rank_collectives,
)
from moetrace_collectors.offline.host_rows import with_host_rows
from moetrace_collectors.offline.inputs import KNOWN, InputKind, expand, kind_of
from moetrace_collectors.offline.kineto import read_trace
from moetrace_collectors.offline.load_dumps import LoadRecording, holds_counts, read_load_dumps, recordings_in
from moetrace_collectors.offline.load_tables import npz_arrays
from moetrace_collectors.offline.nsys import read_nsys
from moetrace_collectors.offline.own_steps import OwnSteps
from moetrace_collectors.offline.phases import recognise
from moetrace_collectors.offline.rank_steps import RankInput, joined_steps
from moetrace_collectors.offline.rank_trace import RankTrace
from moetrace_collectors.offline.source import bad_file, json_lines, read_json
from moetrace_collectors.offline.trace_ranks import BrokenTrace, number_traces
from moetrace_collectors.offline.usage import RankUsage, rank_usage
from moetrace_collectors.offline.wait_matrix import checked_matrix, matrices_in
from moetrace_collectors.traces.step_clocks import step_clocks
from moetrace_collectors.verdict import VerdictEngine
from moetrace_collectors.verdict.wait_matrix import WaitFinding, find_slow

RUN_ID = "trace"
"""Run id of verdicts made from traces, which have none."""

Progress = Callable[[Path, int], None]
"""Told a file and the bytes read of it since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """One file that was read."""

    path: str
    format: str
    rank: int | None
    """For traces."""
    events: int
    """Events of a trace, rank steps of our own files, steps of a load dump, ranks of a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Everything that the views of `analyze` show."""

    files: tuple[FileRead, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    inputs: Mapping[int, RankInput]
    """Traces by rank with what was recognised in them."""
    usage: Mapping[int, RankUsage]
    collectives: tuple[JoinedCollective, ...]
    clocks: Mapping[int, ClockFit]
    joined: tuple[JoinedStep, ...]
    verdicts: tuple[StepVerdict, ...]
    """One per joined step."""
    loads: tuple[LoadRecording, ...]
    wait_matrices: tuple[WaitFinding, ...]
    warnings: tuple[str, ...]

    @property
    def recognised_phases(self) -> bool:
        """Whether any MoE phase was found."""
        return any(usage.moe_layers for usage in self.usage.values()) or bool(self.joined)


@dataclass(slots=True)
class _Read:
    """What has been read so far."""

    files: list[FileRead] = field(default_factory=list)
    traces: list[RankTrace | BrokenTrace] = field(default_factory=list)
    """In the order of their files, which numbers those that do not tell their rank."""
    own: list[OwnSteps] = field(default_factory=list)
    timed: list[JoinedStep] = field(default_factory=list)
    loads: list[LoadRecording] = field(default_factory=list)
    matrices: list[WaitFinding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def analyze(paths: Sequence[Path], *, progress: Progress | None = None) -> Analysis:
    """Analyze files, and the files of folders.

    Raises:
        UsageError: a file that was named cannot be read, or no file of the folders can.
    """
    files, searched = expand(paths)
    named = {path for path in paths if not path.is_dir()}
    read = _Read()
    broken: list[UsageError] = []
    for path in files:
        try:
            kind = kind_of(path)
        except UsageError:
            if path in named or not searched:
                raise
            read.warnings.append(f"passed over, of no known kind: {path}")
            read.traces.append(BrokenTrace(path=path, is_sure=False))
            continue
        try:
            _read_file(path, kind, read, named=path in named, progress=progress)
        except UsageError as error:
            # In a folder of other things a table or document may look like one of ours and be none; a
            # trace that is broken is a trace all the same.
            if path in named:
                raise
            if kind in (InputKind.TABLE, InputKind.ARCHIVE, InputKind.DOCUMENT):
                read.warnings.append(f"passed over: {error}")
            else:
                broken.append(error)
                if kind in (InputKind.TRACE, InputKind.NSYS):
                    read.traces.append(BrokenTrace(path=path, is_sure=True))
    if not read.files and not any(isinstance(one, RankTrace) for one in read.traces):
        if broken:
            raise broken[0]
        raise UsageError(f"{paths[0]}: nothing here is of a known kind; expected is {KNOWN}")
    # First, so that they are among those that are shown.
    read.warnings[:0] = [f"left out, and broken: {error}" for error in broken]
    return _analyse(read)


def _read_file(path: Path, kind: InputKind, read: _Read, *, named: bool, progress: Progress | None) -> None:
    told = None if progress is None else (lambda size: progress(path, size))
    if kind is InputKind.TRACE or kind is InputKind.NSYS:
        trace = (read_trace if kind is InputKind.TRACE else read_nsys)(path, progress=told)
        read.traces.append(trace)
        return
    if kind is InputKind.OWN:
        _add_own(read, own_steps.read_own(path))
    elif kind is InputKind.OTLP_LINES:
        _add_own(read, own_steps.read_otlp(path, ((f"line {n}", line) for n, line in json_lines(path))))
    elif kind is InputKind.OTLP:
        document = read_json(path)
        if not isinstance(document, dict):
            raise bad_file(path, "", "OTLP/JSON export request expected")
        _add_own(read, own_steps.read_otlp(path, iter([("document", document)])))
    elif kind is InputKind.ARCHIVE:
        arrays = npz_arrays(path)
        if duration_arrays.NAME in arrays:
            steps = duration_arrays.steps_of_durations(arrays, path)
            read.timed += steps
            read.files.append(
                FileRead(path=str(path), format=duration_arrays.FORMAT, rank=None, events=len(steps))
            )
            return
        square = {n: a for n, a in arrays.items() if a.ndim == 2 and a.shape[0] == a.shape[1]}
        if square and not {"logical_count", "counts", "layer"} & set(arrays):
            for name, array in square.items():
                _add_matrix(read, path, name, array)
        else:
            _add_loads(read, read_load_dumps(path))
    elif kind is InputKind.DOCUMENT:
        _read_document(path, read, named=named)
    else:
        _add_loads(read, read_load_dumps(path))


def _read_document(path: Path, read: _Read, *, named: bool) -> None:
    document = read_json(path)
    if isinstance(document, dict) and "traceEvents" in document:
        raise bad_file(path, "traceEvents", "array of events expected")
    if holds_counts(document):
        _add_loads(read, recordings_in(document, path))
        return
    matrices = matrices_in(document)
    if matrices:
        for name, value in matrices.items():
            _add_matrix(read, path, name, value)
        return
    if isinstance(document, list) and document and isinstance(document[0], list):
        _add_loads(read, recordings_in(document, path))
        return
    if named:
        raise bad_file(path, "", f"JSON of no known kind; expected is {KNOWN}")
    read.warnings.append(f"passed over, of no known kind: {path}")


def _add_own(read: _Read, own: OwnSteps) -> None:
    read.own.append(own)
    read.warnings += own.warnings
    read.files.append(FileRead(path=own.source, format=own.format, rank=None, events=len(own.rank_steps)))


def _add_loads(read: _Read, recordings: Sequence[LoadRecording]) -> None:
    for recording in recordings:
        read.loads.append(recording)
        read.warnings += recording.warnings
        read.files.append(
            FileRead(path=recording.source, format=recording.format, rank=None, events=len(recording.steps))
        )


def _add_matrix(read: _Read, path: Path, name: str, value: object) -> None:
    finding = find_slow(name, checked_matrix(value, path, name))
    read.matrices.append(finding)
    read.files.append(FileRead(path=str(path), format="wait_matrix", rank=None, events=finding.size))


def _analyse(read: _Read) -> Analysis:
    warnings = list(read.warnings)
    traces, alone = number_traces(read.traces, warnings)
    inputs = {}
    for trace in traces:
        read.files.append(
            FileRead(path=trace.source, format=trace.format, rank=trace.rank, events=trace.events)
        )
        inputs[trace.rank] = _recognised(trace, warnings)
    usage = {rank: rank_usage(given.trace, given.phases) for rank, given in inputs.items()}
    together = {rank: given for rank, given in inputs.items() if rank not in alone}
    join = _join(together, warnings)
    contradicted = set(together) - set(join.clocks) if len(together) > 1 else set()
    trace_steps: tuple[JoinedStep, ...] = ()
    if not any(given.phases.is_exchange.any() for given in together.values()):
        pass
    elif len(together) < 2:
        warnings.append("one rank only: what the other ranks waited for cannot be told, so no rank is named")
    elif contradicted:
        listed = ", ".join(str(rank) for rank in sorted(contradicted))
        warnings.append(f"no verdicts: the exchanges of rank {listed} are not sure to be those of the others")
    else:
        trace_steps = joined_steps(RUN_ID, together)
    own: list[RankStep] = [one for own_file in read.own for one in own_file.rank_steps]
    own_joined, own_warnings = own_steps.join(own)
    warnings += own_warnings
    joined = (*trace_steps, *own_joined, *read.timed)
    clocks = dict(join.clocks) if len(together) > 1 else {}
    if not inputs:
        clocks, clock_warnings = step_clocks(own_joined)
        warnings += clock_warnings
    engine = VerdictEngine()
    # The order of steps is the order of what the engine remembers of calm ones.
    analysis = Analysis(
        files=tuple(read.files),
        ranks=tuple(sorted({*inputs, *(one.rank for step in joined for one in step.rank_steps)})),
        steps=tuple(
            sorted({*(s for g in inputs.values() for s in g.phases.steps), *(one.step for one in joined)})
        ),
        inputs=inputs,
        usage=usage,
        collectives=join.joined,
        clocks=clocks,
        joined=joined,
        verdicts=tuple(engine.judge(step) for step in joined),
        loads=tuple(read.loads),
        wait_matrices=tuple(read.matrices),
        warnings=(),
    )
    if inputs and not any(one.moe_layers for one in usage.values()):
        warnings.append("no MoE phase recognised: no annotation and no kernel of a known name")
    return replace(analysis, warnings=tuple(dict.fromkeys(warnings)))


def _recognised(trace: RankTrace, warnings: list[str]) -> RankInput:
    rows = with_host_rows(trace)
    if not len(trace.device):
        what = "times are of host annotations" if len(rows.device) else "it holds no interval of a known name"
        warnings.append(f"{trace.source}: no device activity; {what}")
    for reason, count in sorted(trace.left_out.items()):
        warnings.append(f"{trace.source}: {count} events left out ({reason})")
    phases = recognise(rows)
    return RankInput(trace=rows, phases=phases, collectives=rank_collectives(rows, phases))


def _join(together: Mapping[int, RankInput], warnings: list[str]) -> CollectiveJoin:
    if len(together) < 2:
        return CollectiveJoin(joined=(), clocks={})
    join = join_collectives({rank: given.collectives for rank, given in together.items()})
    warnings += join.warnings
    world = max((given.trace.world_size or 0 for given in together.values()), default=0)
    absent = sorted({rank for one in join.joined for rank in one.missing_ranks})
    if not absent and world > len(together) and not all(one.group[1] for one in join.joined):
        absent = [rank for rank in range(world) if rank not in together]
    if absent:
        listed = ", ".join(str(rank) for rank in absent[:8]) + (" ..." if len(absent) > 8 else "")
        warnings.append(
            f"ranks {listed} of the job are not among the files: waits are lower bounds, and what released a "
            "collective may be one of them"
        )
    return join
