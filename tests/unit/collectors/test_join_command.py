"""`moetrace join` says what is wrong with a store in one line, and keeps its endpoint right meanwhile."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from clickhouse_connect.driver.exceptions import OperationalError
from starlette.applications import Starlette
from starlette.testclient import TestClient

from moetrace_collectors.commands import join
from moetrace_collectors.commands.join_endpoint import Endpoint
from moetrace_collectors.errors import UsageError
from moetrace_collectors.roll_ups import queries
from moetrace_collectors.store_clock import NOW
from moetrace_collectors.store_join.join_metrics import JoinMetrics
from moetrace_collectors.store_join.lease import BEAT, HOLDERS
from moetrace_schemas.clickhouse.render import migrations


@dataclass
class Answer:
    """Rows, most of them asked for without names."""

    result_rows: list[list[Any]] = field(default_factory=list)
    named: list[dict[str, Any]] = field(default_factory=list)

    def named_results(self) -> list[dict[str, Any]]:
        """Rows by name."""
        return self.named


@dataclass
class LeavingStore:
    """A current and empty store that goes away at a certain query."""

    goes_away_at: str
    others: tuple[str, ...] = ()
    """Who else joins, and began before."""
    shows_own: bool = True
    """Whether it shows who has just begun."""
    beats: list[tuple[str, int]] = field(default_factory=list)
    """(holder, whether it has left)"""

    def command(self, query: str, *, parameters: dict[str, Any]) -> None:
        """A sign of life."""
        assert query == BEAT
        self.beats.append((parameters["holder"], parameters["left"]))

    def query(self, query: str, **options: Any) -> Answer:
        """Answer as far as it goes."""
        if self.goes_away_at in query:
            raise OperationalError("no route to host\nand much more")
        if query == NOW:
            return Answer([[10**12]])
        if query == HOLDERS:
            holders = (*self.others, *([self.beats[-1][0]] if self.shows_own else []))
            return Answer(
                named=[
                    {"holder": name, "begun_us": at, "now_us": 10**15}
                    for at, name in enumerate(("", *holders))
                ]
            )
        if "schema_migrations FINAL" in query:
            return Answer([[one.version, one.name, one.checksum] for one in migrations()])
        return Answer([[1]])

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class FakeEndpoint:
    """Counts how often tokens and certificate were looked at."""

    metrics: JoinMetrics = field(default_factory=lambda: JoinMetrics(series_budget=10))
    refreshes: int = 0

    def refresh(self) -> None:
        """Count."""
        self.refreshes += 1


def refusal_of_once(store: LeavingStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `moetrace join --once` says of this store."""
    monkeypatch.setattr(join, "open_client", lambda address: store)
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    with pytest.raises(UsageError) as caught:
        join.run(parser.parse_args(["--dsn", "clickhouse://store:8123", "--once"]))
    return str(caught.value)


@pytest.mark.parametrize("query", ["system.tables", queries.WRITTEN])
def test_a_store_that_goes_away_is_one_line(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its migrations are looked at, and while minutes are rolled up at the end of `--once`."""
    assert refusal_of_once(LeavingStore(query), monkeypatch) == "the store does not answer: no route to host"


def test_once_leaves_the_store_to_a_join_that_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says so and what to do, and it is out of the other's way again."""
    store = LeavingStore("nothing goes away", others=("host:1:ab",))
    assert refusal_of_once(store, monkeypatch) == (
        "another moetrace join is at work in clickhouse://store:8123: leave the steps to it, or stop it; one "
        "that was killed counts for a minute"
    )
    assert [left for _, left in store.beats] == [0, 1]


def test_once_says_of_a_store_that_lags_that_it_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is said to be at work who is not known to be."""
    store = LeavingStore("nothing goes away", shows_own=False)
    assert refusal_of_once(store, monkeypatch) == (
        "clickhouse://store:8123 does not show yet that this moetrace join has begun, as a replica that lags "
        "does, so another one may be at work: run it again"
    )


def test_who_may_ask_is_read_again_while_the_store_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    """A token that was taken back must not hold because of another machine's trouble."""
    endpoint = FakeEndpoint()
    join._failed(UsageError("the store does not answer: away"), cast(Endpoint, endpoint))
    assert endpoint.refreshes == 1
    assert capsys.readouterr().err == "moetrace join: the store does not answer: away; trying again\n"


def test_health_tells_nothing_of_the_store() -> None:
    """Anyone may ask; what the store said is for the log."""
    endpoint = FakeEndpoint()
    client = TestClient(Starlette(routes=endpoint.metrics.routes()))
    assert client.get("/healthz").status_code == 200
    join._failed(UsageError("https://me@secret-host:8443 says no"), cast(Endpoint, endpoint))
    answer = client.get("/healthz")
    assert (answer.status_code, "secret-host" in answer.text) == (503, False)
    join._turned(0, cast(Endpoint, endpoint))
    assert client.get("/healthz").status_code == 200
