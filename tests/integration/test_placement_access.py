"""Placement commands against a collector with TLS and tokens: each with the scope it needs, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import Certificates, make_certificates
from ledger_builders import EVEN
from moetrace_collectors.cli import main

from .collector_process import CollectorProcess, collector

INGEST, READ, BOTH = "ingest" * 6, "read" * 8, "planner" * 5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of this module."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, files: Certificates) -> Iterator[CollectorProcess]:
    """A collector with TLS and tokens; a planner needs to write and to read."""
    directory = tmp_path_factory.mktemp("run")
    tokens = directory / "tokens"
    tokens.write_text(f"ranks ingest {INGEST}\npeople read {READ}\nplanner ingest,read {BOTH}\n")
    tokens.chmod(0o600)
    with collector(
        directory, "--tls-certificate", str(files.certificate), "--tls-key", str(files.key),
        "--token-file", str(tokens),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A proposal."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"run_id": "secured", "ranks": 4, "version": 1, "physical_to_logical": EVEN}))
    return path


def trust(monkeypatch: pytest.MonkeyPatch, files: Certificates, token: str | None) -> None:
    """What a client's environment says."""
    monkeypatch.setenv("MOETRACE_CA_FILE", str(files.ca))
    monkeypatch.delenv("MOETRACE_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("MOETRACE_TOKEN", token)


@pytest.mark.parametrize(
    ("token", "said"),
    [(None, "MOETRACE_TOKEN"), ("wrong" * 8, "MOETRACE_TOKEN"), (INGEST, "read"), (READ, "ingest")],
)
def test_a_token_without_both_scopes_records_nothing(
    secured: CollectorProcess,
    files: Certificates,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    said: str,
) -> None:
    """Exit code 2 and one line that names what is missing, never the token."""
    trust(monkeypatch, files, token)
    assert main(["placement", "record", str(record), "--url", secured.http_address]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert token is None or token not in error


def test_a_planner_records_and_verifies_over_tls(
    secured: CollectorProcess,
    files: Certificates,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One token with both scopes; listing and verifying take one that may only read."""
    trust(monkeypatch, files, BOTH)
    assert main(["placement", "record", str(record), "--url", secured.http_address, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["run_id"], row["event"], row["version"]) == ("secured", "proposed", 1)
    trust(monkeypatch, files, READ)
    for part in ("list", "verify"):
        assert main(["placement", part, "--url", secured.http_address, "--run", "secured", "--json"]) == 0
        assert row["row_hash"] in capsys.readouterr().out


def test_a_certificate_that_nobody_vouches_for_is_refused(
    secured: CollectorProcess,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the authority nothing is sent."""
    monkeypatch.setenv("MOETRACE_TOKEN", BOTH)
    monkeypatch.delenv("MOETRACE_CA_FILE", raising=False)
    assert main(["placement", "record", str(record), "--url", secured.http_address]) == 2
    error = capsys.readouterr().err
    assert "certificate" in error
    assert error.count("\n") == 1
