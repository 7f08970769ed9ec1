"""Which rank a trace is taken for that does not tell it, also when files of the set are broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetrace_collectors.offline.analysis import Analysis, analyze
from moetrace_collectors.offline.inputs import expand
from trace_files import moe_traces, write_traces


def analysis_without(
    directory: Path, broken: dict[int, str], *, tells: bool = False, name: str = "trace_{}"
) -> Analysis:
    """Of four ranks' traces, some of which hold other text; their ranks are told, or left to their place."""
    documents = moe_traces(ranks=4, steps=2, layers=1)
    for document in documents:
        if not tells:
            document.pop("distributedInfo", None)
    for rank, path in enumerate(write_traces(directory, documents)):
        if rank in broken:
            path.write_text(broken[rank])
        path.rename(directory / f"{name.format(rank)}.json")
    return analyze([directory])


TRUNCATED = '{"traceEvents": [{"ph": "X", "ts": 1'


@pytest.mark.parametrize("content", [TRUNCATED, ""])
def test_a_broken_trace_keeps_its_number(tmp_path: Path, content: str) -> None:
    """No other rank moves into its place, and the notes say whose trace is left out."""
    analysis = analysis_without(tmp_path, {0: content, 2: TRUNCATED})
    assert [(Path(file.path).name, file.rank) for file in analysis.files] == [
        ("trace_1.json", 1),
        ("trace_3.json", 3),
    ]
    assert list(analysis.warnings[:2]) == [
        f"the trace of rank {rank} is left out: {tmp_path / f'trace_{rank}.json'} is broken"
        for rank in (0, 2)
    ]


def test_a_broken_trace_whose_name_tells_its_rank_is_that_rank(tmp_path: Path) -> None:
    """By its name, whatever its place."""
    analysis = analysis_without(tmp_path, {2: TRUNCATED}, name="of-rank{}")
    assert analysis.ranks == (0, 1, 3)
    assert any(text.startswith("the trace of rank 2 is left out") for text in analysis.warnings)


def test_beside_traces_that_tell_their_ranks_a_broken_one_is_given_none(tmp_path: Path) -> None:
    """Its place says nothing there; that it is left out is said all the same."""
    analysis = analysis_without(tmp_path, {1: TRUNCATED}, tells=True)
    assert analysis.ranks == (0, 2, 3)
    assert not any(text.startswith("the trace of rank") for text in analysis.warnings)
    assert any(text.startswith("left out, and broken") for text in analysis.warnings)


def test_a_file_of_another_name_is_no_rank(tmp_path: Path) -> None:
    """What is of no known kind and not named as the traces are takes no number."""
    (tmp_path / "a_note.json").write_text("")
    analysis = analysis_without(tmp_path, {})
    assert [file.rank for file in analysis.files] == [0, 1, 2, 3]


def test_traces_are_numbered_as_people_count(tmp_path: Path) -> None:
    """Where their place is all that tells their ranks, trace_2 is rank 2 though trace_10 is there."""
    documents = moe_traces(ranks=12, steps=2, layers=1)
    for document in documents:
        document.pop("distributedInfo", None)
    for number, path in enumerate(write_traces(tmp_path, documents)):
        path.rename(tmp_path / f"trace_{number}.json")
    analysis = analyze([tmp_path])
    assert [(Path(file.path).name, file.rank) for file in analysis.files] == [
        (f"trace_{number}.json", number) for number in range(12)
    ]


def test_files_of_a_folder_come_as_people_count_and_named_ones_as_named(tmp_path: Path) -> None:
    """Every number of a name by its value, zeros in front or not; who names files has chosen their order."""
    names = [
        "a.json",
        "node2_10.json",
        "node10_2.json",
        "t.json",
        "t02.json",
        "t2.json",
        "t10.json",
        "t1x.csv",
    ]
    for name in names:
        (tmp_path / name).write_text("{}")
    found, searched = expand([tmp_path])
    assert [path.name for path in found] == [
        "a.json", "node2_10.json", "node10_2.json", "t1x.csv", "t02.json", "t2.json", "t10.json", "t.json",
    ]  # fmt: skip
    assert searched
    named = [tmp_path / "t10.json", tmp_path / "t2.json"]
    assert expand(named) == (named, False)
