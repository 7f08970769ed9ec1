"""What backward exchanges carried is derived from what went forward, and only where they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from backward_store import SENT
from integration.collector_process import moetrace, rows, run_script


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory filled by backward_store."""
    directory = tmp_path_factory.mktemp("backward")
    run_script("backward_store", directory / "store")
    return directory


def test_gradients_take_the_way_of_the_other_exchange(store: Path) -> None:
    """The backward of combine sends what dispatch sent, the backward of dispatch what combine sent."""
    found = rows(
        store,
        "SELECT step, layer, phase, direction, source_rank, destination_rank, rows, scope "
        "FROM v_backward_traffic",
    )
    want = {
        (step, layer, phase, source, destination): int(
            SENT[source][destination] if phase == "combine" else SENT[destination][source]
        )
        for step, layer in ((0, 0), (0, 1), (1, 0))
        for phase in ("dispatch", "combine")
        for source in range(4)
        for destination in range(4)
    }
    have = {
        (int(str(row["step"])), row["layer"], row["phase"], row["source_rank"], row["destination_rank"]): int(
            str(row["rows"])
        )
        for row in found
    }
    assert have == want
    assert {row["direction"] for row in found} == {"backward"}
    assert {row["scope"] for row in found} == {"same_rank", "same_node", "cross_node"}


def test_what_ranks_tell_stays_forward(store: Path) -> None:
    """The table and v_traffic hold one direction, so that a sum over them is not of both."""
    for name in ("rank_traffic", "v_traffic"):
        found = rows(
            store,
            f"SELECT toString(direction) AS direction, sum(rows) AS sent FROM {name} GROUP BY direction",
        )
        [(direction, sent)] = [(row["direction"], int(str(row["sent"]))) for row in found]
        assert (direction, sent) == ("forward", 2 * 2 * 2 * SENT.sum())


def test_a_step_is_read_by_its_primary_key(store: Path) -> None:
    """A filter on run and step reaches the tables below the view."""
    plan = rows(
        store,
        "EXPLAIN indexes = 1, pretty = 0 SELECT * FROM v_backward_traffic "
        "WHERE run_id = 'backward' AND step = 1",
    )
    text = "\n".join(str(row["explain"]) for row in plan)
    reads = text.count("ReadFromMergeTree")
    assert reads >= 3
    assert text.count("step in [1, 1]") == reads, text


def test_the_cookbook_shows_directions_apart(store: Path) -> None:
    """Shares are of one direction each; the size of what goes back is not known."""
    done = moetrace(
        "query", "--dir", str(store), "--format", "TSV",
        "--cookbook", "cross_node_share", "--param", "run=backward",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    by_direction = {
        direction: [line for line in lines if line[1] == direction] for direction in ("forward", "backward")
    }
    for direction, of in by_direction.items():
        for phase in ("dispatch", "combine"):
            assert sum(float(line[5]) for line in of if line[0] == phase) == pytest.approx(1.0, abs=1e-3), (
                direction
            )
    assert {line[6] for line in by_direction["backward"]} == {"\\N"}
