"""What collectors/SECURITY.md shows is what happens: the refusal, the recipe of tokens, the names."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moetrace.config import Config
from moetrace_collectors.access import client
from moetrace_collectors.access.scopes import Scope
from moetrace_collectors.access.tokens import TokenBook
from moetrace_collectors.config import CollectorConfig
from moetrace_collectors.errors import UsageError
from moetrace_schemas.enums import RejectReason

COLLECTORS = Path(__file__).resolve().parents[2] / "collectors"
SECURITY = (COLLECTORS / "SECURITY.md").read_text(encoding="utf-8")
README = (COLLECTORS / "README.md").read_text(encoding="utf-8")


def test_the_refusal_reads_as_shown() -> None:
    """The line under the first command is the collector's own."""
    with pytest.raises(UsageError) as error:
        CollectorConfig(host="0.0.0.0", token_variable="")
    assert f"moetrace: {error.value}\n" in SECURITY


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_recipe_makes_a_token_file(tmp_path: Path) -> None:
    """The shell lines, run as they stand, give three tokens with their scopes that only their owner reads."""
    recipe = re.search(r"umask 077\n.*?\nEND\n", SECURITY, re.DOTALL)
    assert recipe is not None
    subprocess.run(["sh", "-c", recipe[0]], cwd=tmp_path, check=True)
    path = tmp_path / "tokens"
    assert path.stat().st_mode & 0o077 == 0
    assert TokenBook(file=path).names == ("ranks", "grafana", "operator")


def test_what_is_named_exists() -> None:
    """Settings of ranks, variables of readers and scopes stand under their real names."""
    for name in ("token_file", "ca_file", "client_certificate", "client_key"):
        assert name in SECURITY
        assert hasattr(Config(), name)
    for variable in (client.TOKEN, client.TOKEN_FILE, client.CA_FILE, client.CERTIFICATE, client.KEY):
        assert f"`{variable}`" in SECURITY
    assert all(f"| `{scope}` |" in SECURITY for scope in Scope)
    assert CollectorConfig().token_variable in SECURITY


def test_every_reason_of_a_limit_stands_in_the_table_of_bounds() -> None:
    """A limit without a line there is one that nobody can look up."""
    limits = (
        RejectReason.BODY_TOO_LARGE,
        RejectReason.TOO_MANY_SPANS,
        RejectReason.TOO_MANY_ATTRIBUTES,
        RejectReason.ATTRIBUTE_TOO_LARGE,
        RejectReason.TOO_DEEP,
    )
    assert all(f"`{reason}`" in README for reason in limits)
    for option in (
        "max_spans_per_request",
        "max_connections",
        "client_requests_per_s",
        "client_request_burst",
    ):
        assert f"`{option}`" in README
        assert hasattr(CollectorConfig(), option)
