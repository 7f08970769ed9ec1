"""Tokens: read from files and the environment, scoped, rotated, and never shown."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.access import tokens as tokens_module
from moetrace_collectors.access.scopes import Scope, covers, scope_of
from moetrace_collectors.access.tokens import TokenBook, parse_tokens
from moetrace_collectors.errors import UsageError

INGEST, READ = "i" * 32, "r" * 32


def token_file(path: Path, text: str) -> Path:
    """A token file that only its owner reads, with a time of its own."""
    before = path.stat().st_mtime_ns if path.exists() else 10**18
    path.write_text(text)
    path.chmod(0o600)
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return path


def test_a_line_is_name_scopes_token(tmp_path: Path) -> None:
    """Comments and empty lines are skipped; a token gives its scopes and no others."""
    text = f"# name scopes token\n\nranks ingest {INGEST} # the job\nboth ingest,read {READ}\n"
    book = TokenBook(file=token_file(tmp_path / "tokens", text))
    ranks, both = book.find(INGEST), book.find(READ)
    assert ranks is not None
    assert both is not None
    assert (ranks.name, ranks.scopes) == ("ranks", {Scope.INGEST})
    assert both.scopes == {Scope.INGEST, Scope.READ}
    assert book.find("x" * 32) is None
    assert book.find("") is None


def test_tokens_of_the_environment_join_those_of_the_file(tmp_path: Path) -> None:
    """Both hold; lines of a variable may be parted by semicolons."""
    book = TokenBook(
        file=token_file(tmp_path / "tokens", f"ranks ingest {INGEST}"),
        environment=f"one read {READ}; two admin {'a' * 24}",
        variable="MOETRACE_COLLECTOR_TOKENS",
    )
    assert book.names == ("one", "two", "ranks")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks", "line 1: NAME SCOPES TOKEN expected"),
        (f"\nranks ingest {INGEST} extra", "line 2: NAME SCOPES TOKEN expected"),
        (f"ranks write {INGEST}", "line 1: unknown scope of ranks"),
        (f"ra/nks ingest {INGEST}", "line 1: the name is up to 64 of"),
        ("ranks ingest secretsecret", "line 1: the token of ranks is not 24 to 512 of"),
        ("ranks ingest " + 'secret"' * 5, "line 1: the token of ranks is not 24 to 512 of"),
        (f"{INGEST} ingest ranks", "line 1: the token of this line is not 24 to 512 of"),
        (f"{INGEST} ranks ingest", "line 1: unknown scope of this line"),
        (f"a ingest {INGEST}\na read {READ}", "two tokens are called a"),
        (f"a ingest {INGEST}\nb read {INGEST}", "one token stands there twice"),
        ("\n".join(f"n{i} read {i:032d}" for i in range(257)), "257 tokens, at most 256"),
        ("# nothing\n", "holds no token"),
    ],
)
def test_a_wrong_line_is_named_and_its_token_is_not_shown(tmp_path: Path, text: str, message: str) -> None:
    """The message says file and line; neither it nor a traceback holds a token."""
    with pytest.raises(UsageError) as error:
        TokenBook(file=token_file(tmp_path / "tokens", text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    shown = "".join(traceback.format_exception_only(error.value))
    assert not any(secret in shown for secret in (INGEST, READ, "secret"))


def test_only_digests_are_kept(tmp_path: Path) -> None:
    """Nothing that a book holds, printed or not, is a token."""
    book = TokenBook(file=token_file(tmp_path / "tokens", f"ranks ingest {INGEST}"))
    assert INGEST not in repr(vars(book))
    assert INGEST not in repr(book.find(INGEST))


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search compares digests of one length with all tokens, found or not, by hmac.compare_digest."""
    lengths: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        lengths.append((len(left), len(right)))
        return real(left, right)

    book = TokenBook(file=None, environment=f"a ingest {INGEST};b read {READ};c read {'c' * 24}")
    monkeypatch.setattr(tokens_module.hmac, "compare_digest", compare)
    for candidate in (INGEST, READ, "", "x" * 100_000):
        lengths.clear()
        book.find(candidate)
        assert lengths == [(32, 32)] * 3


def test_a_changed_file_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New tokens hold, old ones do not; a file that is wrong or gone changes nothing, said once each."""
    path = token_file(tmp_path / "tokens", f"ranks ingest {INGEST}")
    book = TokenBook(file=path)
    assert not book.refresh()
    token_file(path, f"ranks ingest {READ}")
    assert book.refresh()
    assert book.find(INGEST) is None
    assert book.find(READ) is not None
    token_file(path, "ranks\n")
    with caplog.at_level(logging.WARNING):
        assert not book.refresh()
        assert not book.refresh()
        path.unlink()
        assert not book.refresh()
    assert book.find(READ) is not None
    assert [record.message.count("stay valid") for record in caplog.records] == [1, 1]
    token_file(path, f"ranks ingest {INGEST}")
    assert book.refresh()
    assert book.find(INGEST) is not None


def test_a_file_that_others_can_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token file should be its owner's; the warning holds the path and no token."""
    path = token_file(tmp_path / "tokens", f"ranks ingest {INGEST}")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        TokenBook(file=path)
    assert "chmod 600" in caplog.text
    assert INGEST not in caplog.text


@pytest.mark.parametrize("make", [lambda p: p / "none", lambda p: p])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: object) -> None:
    """Missing, or a folder: a usage error with the path."""
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=f"token_file = {path}: cannot be read"):
        TokenBook(file=path)


@given(text=st.text(max_size=200))
def test_any_text_is_tokens_or_a_usage_error(text: str) -> None:
    """No token file makes anything else happen."""
    with contextlib.suppress(UsageError):
        parse_tokens(text, source="file")


def test_a_route_is_readable_with_a_read_token_unless_it_says_otherwise() -> None:
    """A new page is never open by mistake; admin covers every scope and ingest does not cover read."""
    assert scope_of("/some/new/page", {"/healthz": None}) is Scope.READ
    assert scope_of("/healthz", {"/healthz": None}) is None
    assert covers(frozenset({Scope.ADMIN}), Scope.READ)
    assert not covers(frozenset({Scope.INGEST}), Scope.READ)
    assert not covers(frozenset({Scope.READ}), Scope.ADMIN)
