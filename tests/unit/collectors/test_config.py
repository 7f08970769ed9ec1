"""The collector's configuration fails fast, in one line that names field, value and fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moetrace_collectors.config import CollectorConfig, load_config
from moetrace_collectors.errors import UsageError

EXAMPLE = Path(__file__).parents[3] / "collectors" / "collector.example.toml"


def test_the_example_file_holds_every_option_with_its_default() -> None:
    """Loading collector.example.toml gives the defaults, and no option is missing from it."""
    assert load_config(EXAMPLE, {}) == CollectorConfig()
    text = EXAMPLE.read_text()
    for field in dataclasses.fields(CollectorConfig):
        assert f"\n{field.name} = " in text, field.name


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """A flag that was given replaces the file's value; one that was not leaves it."""
    file = tmp_path / "collector.toml"
    file.write_text('http_port = 1111\ngrpc_port = 2222\ndirectory = "somewhere"\n')
    config = load_config(file, {"http_port": 3333, "grpc_port": None})
    assert (config.http_port, config.grpc_port, config.directory) == (3333, 2222, Path("somewhere"))
    assert config.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"http_port": 70_000}, "http_port = 70000: 0 to 65535 expected"),
        ({"http_port": "4318"}, "http_port = '4318': a value of type int expected"),
        ({"http_port": True}, "http_port = True: a value of type int expected"),
        ({"join_timeout_s": 0.0}, "join_timeout_s = 0.0: 0.01 to 86400 expected"),
        ({"join_timeout_s": float("nan")}, "join_timeout_s = nan: 0.01 to 86400 expected"),
        ({"database": "a; DROP"}, "database 'a; DROP': a letter or _ and up to 63 of [A-Za-z0-9_] expected"),
        (
            {"dsn": "mysql://host"},
            "store dsn 'mysql://host': "
            "chdb:///absolute/path, clickhouse://host:8123 or https://host:8443 expected",
        ),
        (
            {"host": "0.0.0.0"},
            "host = '0.0.0.0' is reachable from other machines: add tls_certificate and tls_key, and "
            "token_file (or tls_client_ca); or keep 127.0.0.1, or add --insecure on a network you trust",
        ),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(flags: dict[str, object], message: str) -> None:
    """A value of the wrong type or out of range is refused before anything starts."""
    with pytest.raises(UsageError) as error:
        load_config(None, flags)
    assert str(error.value) == message


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    """A misspelt option is not silently ignored."""
    file = tmp_path / "collector.toml"
    file.write_text("http_prot = 1\n")
    with pytest.raises(UsageError, match="unknown option http_prot"):
        load_config(file, {})


@pytest.mark.parametrize("text", ["http_port = ", "\x00"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, text: str) -> None:
    """A broken file is a usage error that says where."""
    file = tmp_path / "collector.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"collector\.toml is not TOML"):
        load_config(file, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that does not exist is a usage error."""
    with pytest.raises(UsageError, match=r"cannot read .*nowhere"):
        load_config(tmp_path / "nowhere", {})


def test_insecure_allows_other_hosts() -> None:
    """With --insecure the collector listens where it is told."""
    assert CollectorConfig(host="0.0.0.0", insecure=True).host == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_flag(host: str) -> None:
    """Every spelling of loopback is fine."""
    assert CollectorConfig(host=host).host == host
