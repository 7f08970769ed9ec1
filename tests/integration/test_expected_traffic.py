"""Rows from rank to rank, from what routers chose and where experts lie, beside what dispatchers say."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.collector_process import moetrace, rows, run_script


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory filled by expected_store."""
    directory = tmp_path_factory.mktemp("expected")
    run_script("expected_store", directory / "store")
    return directory


def test_experts_in_order_give_what_dispatchers_sent(store: Path) -> None:
    """Of every pair of ranks, hosts and scope included; pairs without a row are expected to have none."""
    columns = (
        "layer, source_rank, destination_rank, destination_ep_rank, source_host, destination_host, scope"
    )
    told, expected = (
        rows(
            store,
            f"SELECT {columns}, toInt64(rows) AS sent FROM {view} WHERE run_id = 'in-order' AND rows > 0 "
            f"ORDER BY {columns}",
        )
        for view in ("v_traffic", "v_expected_traffic")
    )
    assert expected == told
    assert {row["scope"] for row in expected} == {"same_rank", "same_node", "cross_node"}
    [split] = rows(store, "SELECT max(is_split) AS any FROM v_expected_traffic WHERE run_id = 'in-order'")
    assert split["any"] == 0


def test_a_placement_says_where_experts_lie(store: Path) -> None:
    """Padding is sent and dropped pairs are not; copies of an expert share its rows, which is said."""
    found = rows(
        store,
        "SELECT source_rank, destination_rank, rows, is_split FROM v_expected_traffic "
        "WHERE run_id = 'placed' AND step = 0 ORDER BY source_rank, destination_rank",
    )
    have = [tuple(row[name] for name in ("source_rank", "destination_rank", "rows")) for row in found]
    # Rank 0 holds expert 0 and half of expert 3; rank 1 experts 1 and 2 and the other half.
    assert have == [(source, there, [31, 65][there]) for source in (0, 1) for there in (0, 1)]
    assert {row["is_split"] for row in found} == {1}


def test_a_placement_that_is_not_known_says_nothing(store: Path) -> None:
    """An epoch whose mapping never came is no reason to take experts for lying in order."""
    assert rows(store, "SELECT * FROM v_expected_traffic WHERE run_id = 'placed' AND step = 1") == []


def test_a_step_is_read_by_its_primary_key(store: Path) -> None:
    """A filter on run and step reaches the tables below the view."""
    plan = rows(
        store,
        "EXPLAIN indexes = 1, pretty = 0 SELECT * FROM v_expected_traffic "
        "WHERE run_id = 'in-order' AND step = 0",
    )
    text = "\n".join(str(row["explain"]) for row in plan)
    assert text.count("step in [0, 0]") >= 3, text


@pytest.mark.parametrize(("run", "told"), [("in-order", "1"), ("placed", "\\N")])
def test_the_cookbook_sets_both_side_by_side(store: Path, run: str, told: str) -> None:
    """What a dispatcher says is compared with what is expected; nothing stands where it says nothing."""
    done = moetrace(
        "query", "--dir", str(store), "--format", "TSV",
        "--cookbook", "expected_traffic", "--param", f"run={run}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines
    assert {line[-1] for line in lines} == {told}
