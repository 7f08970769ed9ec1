"""A store's DSN is read as people write it, and shown without its password."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import OperationalError

from moetrace_collectors.errors import UsageError
from moetrace_collectors.read_only_query import _HARMLESS
from moetrace_collectors.store import SERVER_SETTINGS, first_line, open_client, parse_store


@pytest.mark.parametrize(
    ("dsn", "interface"),
    [
        ("clickhouse://host:8123", "http"),
        ("http://host", "http"),
        ("clickhouses://host", "https"),
        ("https://user:word@host:8443/db", "https"),
    ],
)
def test_a_server_dsn_says_its_interface(dsn: str, interface: str) -> None:
    """The scheme decides between http and https, whatever the port."""
    address = parse_store(dsn)
    assert (address.interface, address.embedded_path) == (interface, None)


def test_an_embedded_dsn_says_its_path() -> None:
    """chdb:///path is a folder of this machine."""
    assert parse_store("chdb:///data/store").embedded_path == Path("/data/store")


@pytest.mark.parametrize(
    "dsn", ["", "store", "chdb://relative", "chdb:///", "chdb:///a?b=c", "clickhouse://", "http://host:port"]
)
def test_anything_else_is_refused(dsn: str) -> None:
    """What is no DSN is a usage error that shows one."""
    with pytest.raises(UsageError, match="chdb:///absolute/path"):
        parse_store(dsn)


def test_a_server_that_does_not_answer_is_one_clear_line() -> None:
    """What, where and the fix, and nothing of the libraries that carried the request."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        dsn = f"clickhouse://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError) as caught:
            open_client(parse_store(dsn))
    message = str(caught.value)
    assert message.startswith(
        f"no ClickHouse answers at {dsn} (connection refused): check the host and its HTTP"
    )
    assert "HTTPConnection" not in message


def test_a_certificate_that_does_not_hold_is_not_taken_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice about host and port would send people the wrong way."""

    def refuse(**_: Any) -> None:
        try:
            raise ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")
        except ssl.SSLError as error:
            raise OperationalError("certificate verify failed: self-signed certificate") from error

    monkeypatch.setattr(clickhouse_connect, "get_client", refuse)
    with pytest.raises(UsageError) as caught:
        open_client(parse_store("https://db:8443"))
    assert str(caught.value) == (
        "cannot open the store https://db:8443: certificate verify failed: self-signed certificate"
    )


def test_a_server_is_asked_to_shard_what_it_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Migrations fill tables from tables: without the setting rows would stay on the shard they come from."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(clickhouse_connect, "get_client", lambda **options: asked.update(options))
    open_client(parse_store("clickhouse://host"))
    assert asked["settings"]["parallel_distributed_insert_select"] == 0


def test_an_insert_is_answered_once_its_rows_are_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a profile says; servers do not deduplicate through views where inserts are asynchronous."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(clickhouse_connect, "get_client", lambda **options: asked.update(options))
    open_client(parse_store("clickhouse://host"))
    assert asked["settings"]["deduplicate_blocks_in_dependent_materialized_views"] == 1
    assert asked["settings"]["async_insert"] == 0


def test_the_query_api_takes_the_settings_of_its_own_client() -> None:
    """The commands that read a store can also be pointed at a collector's query API."""
    for name, value in SERVER_SETTINGS.items():
        assert (name, str(value)) in _HARMLESS


def test_a_password_is_never_shown() -> None:
    """The display form of a DSN keeps the user and hides the password."""
    assert parse_store("https://me:secret@host:1").display == "https://me:***@host:1"


@pytest.mark.parametrize(
    ("text", "line"), [("one\ntwo", "one"), ("", "no reason given"), ("x" * 400, "x" * 300)]
)
def test_an_error_becomes_one_line(text: str, line: str) -> None:
    """People see the first line of an engine's message, of bounded length."""
    assert first_line(ValueError(text)) == line
