"""What a rank shows to the collector: a token that rotates, an authority that holds, and honest advice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import requests

from moetrace.config import Config
from moetrace.emit.exporter import LastAnswer, TokenFile, make_exporter, make_session
from moetrace.errors import ConfigError


def shown(auth: TokenFile) -> str:
    """The header that a request would carry."""
    return str(auth(requests.Request("POST", "http://c/").prepare()).headers["Authorization"])


def write(path: Path, text: str, second: int) -> None:
    """A file with a time of its own."""
    path.write_text(text)
    os.utime(path, (second, second))


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """A rotated token is shown; while the file is gone or empty the one before is."""
    path = tmp_path / "token"
    write(path, "first\n", 1)
    auth = TokenFile(str(path))
    assert shown(auth) == "Bearer first"
    write(path, "second", 2)
    assert shown(auth) == "Bearer second"
    write(path, "", 3)
    assert shown(auth) == "Bearer second"
    path.unlink()
    assert shown(auth) == "Bearer second"


@pytest.mark.parametrize("text", ["", "two words", "\x00\xff"])
def test_a_file_without_one_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    """The message names the file and never what is in it."""
    path = tmp_path / "token"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as error:
        TokenFile(str(path))
    assert str(path) in str(error.value)
    assert "two words" not in str(error.value)


@pytest.mark.parametrize("name", ["token_file", "ca_file", "client_certificate", "client_key"])
def test_a_missing_file_is_named_at_once(name: str) -> None:
    """Before anything starts, as every wrong setting."""
    with pytest.raises(ConfigError, match=f"{name}='/no/such': no such file"):
        Config(**{name: "/no/such"})


def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    """It would be left unused silently."""
    key = tmp_path / "key"
    key.write_text("x")
    with pytest.raises(ConfigError, match="client_key needs client_certificate"):
        Config(client_key=str(key))


def test_a_token_is_in_no_text_of_the_configuration() -> None:
    """Configurations are printed and logged."""
    assert "secret" not in repr(Config(headers="authorization=Bearer secret"))


@pytest.mark.parametrize("chosen", ["", "ca.pem"])
def test_the_authority_that_was_chosen_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    """REQUESTS_CA_BUNDLE, set for the whole process, does not replace ca_file; without ca_file it holds."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("x")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    session = make_session(Config(), LastAnswer())
    session.verify = chosen or True
    merged = session.merge_environment_settings("https://c/", {}, None, None, None)
    assert merged["verify"] == (chosen or str(bundle))


def test_standard_variables_fill_what_the_settings_leave_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers, authority and certificate of OTEL_EXPORTER_OTLP_*; the settings win where both are given."""
    files = {}
    for name in ("ca", "own_ca", "certificate", "key"):
        files[name] = tmp_path / name
        files[name].write_text("x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20env,x-team=moe")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(files["ca"]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(files["certificate"]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(files["key"]))

    def sent(**settings: str) -> Any:
        config = Config(endpoint="https://c", **settings)
        session = make_session(config, LastAnswer())
        seen: list[Any] = []

        def send(prepared: requests.PreparedRequest, **named: Any) -> requests.Response:
            seen.append((prepared.headers, named["verify"], named["cert"]))
            answer = requests.Response()
            answer.status_code = 200
            return answer

        monkeypatch.setattr(session, "send", send)
        exporter = make_exporter(config, session)
        exporter.export([])
        return seen[0]

    headers, verify, cert = sent()
    assert (headers["authorization"], headers["x-team"]) == ("Bearer env", "moe")
    assert (verify, cert) == (str(files["ca"]), (str(files["certificate"]), str(files["key"])))
    headers, verify, _ = sent(headers="authorization=Bearer own", ca_file=str(files["own_ca"]))
    assert (headers["authorization"], headers["x-team"], verify) == (
        "Bearer own",
        "moe",
        str(files["own_ca"]),
    )


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "token_file"), (403, "scope ingest"), (404, "base URL"), (429, "429"), (500, "HTTP 500")],
)
def test_a_refusal_is_explained(status: int, said: str) -> None:
    """What the collector answered becomes advice in the one warning."""
    answers, response = LastAnswer(), requests.Response()
    assert answers.advice() == ""
    response.status_code = status
    answers.note(response)
    assert said in answers.advice()
    response.status_code = 200
    answers.note(response)
    assert answers.advice() == ""


def test_a_failed_handshake_is_explained() -> None:
    """The reason of TLS, without the rest of the exception."""
    answers = LastAnswer()
    answers.note_tls(
        Exception("... certificate verify failed: unable to get local issuer certificate (_ssl.c:1)")
    )
    assert answers.advice().startswith(
        " (TLS: certificate verify failed: unable to get local issuer certificate"
    )
    answers.note_tls(Exception("EOF"))
    assert "the handshake failed" in answers.advice()
