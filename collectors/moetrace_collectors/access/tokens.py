"""The collector's bearer tokens: named, scoped, from a file or the environment, compared in constant time.

One token a line, as in::

    # name     scopes        token
    ranks      ingest        3f0a...
    grafana    read          91cc...
    operator   read,ingest   77ab...

Only digests are kept. A token is never logged, shown or written anywhere by this package.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetrace_collectors.access.scopes import Scope
from moetrace_collectors.errors import UsageError

MIN_CHARACTERS = 24
MAX_CHARACTERS = 512
MAX_TOKENS = 256
"""Every request is compared with all of them."""
MAX_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
"""What may stand behind `Bearer` in a header (RFC 6750)."""
_EXPECTED = "NAME SCOPES TOKEN expected, as in: ranks ingest 3f0a... (scopes: ingest, read, admin)"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token, without the token."""

    name: str
    """For people: who has it."""
    scopes: frozenset[Scope]
    digest: bytes


def digest_of(token: str) -> bytes:
    """What is kept of a token and compared."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse_tokens(text: str, *, source: str) -> tuple[Token, ...]:
    """Tokens of a file or variable; lines may also be parted by semicolons.

    Args:
        text: one token a line.
        source: what the text came from, for messages, which never show a token.

    Raises:
        UsageError: names source, line and fix.
    """
    tokens: list[Token] = []
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        where = f"{source}, line {number}"
        if len(parts) != 3:
            raise UsageError(f"{where}: {_EXPECTED}")
        tokens.append(_token(*parts, where=where))
    names = [token.name for token in tokens]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{source}: two tokens are called {name}: give each a name of its own")
    if len({token.digest for token in tokens}) < len(tokens):
        raise UsageError(f"{source}: one token stands there twice: make a new one for each name")
    if len(tokens) > MAX_TOKENS:
        raise UsageError(f"{source}: {len(tokens)} tokens, at most {MAX_TOKENS} are taken")
    return tuple(tokens)


def _token(name: str, scopes: str, token: str, *, where: str) -> Token:
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{where}: the name is up to 64 of A-Z a-z 0-9 . _ -; {_EXPECTED}")
    # In a line whose parts changed places the token stands where the name belongs.
    shown = name if len(name) < MIN_CHARACTERS else "this line"
    try:
        granted = frozenset(Scope(scope) for scope in scopes.split(","))
    except ValueError:
        raise UsageError(f"{where}: unknown scope of {shown}; {_EXPECTED}") from None
    if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS or _TOKEN.fullmatch(token) is None:
        raise UsageError(
            f"{where}: the token of {shown} is not {MIN_CHARACTERS} to {MAX_CHARACTERS} of "
            "A-Z a-z 0-9 . _ ~ + / = -: make one with openssl rand -hex 32"
        )
    return Token(name=name, scopes=granted, digest=digest_of(token))


class TokenBook:
    """All tokens of a collector; the file is read again when it has changed."""

    def __init__(self, *, file: Path | None, environment: str = "", variable: str = "") -> None:
        """Read them.

        Args:
            file: tokens of a file; None for none.
            environment: tokens of an environment variable, in the same form.
            variable: the variable's name, for messages.

        Raises:
            UsageError: the file cannot be read, or a line is wrong, or there is no token at all.
        """
        self._file = file
        self._fixed = parse_tokens(environment, source=f"${variable}")
        self._signature: tuple[int, ...] = ()
        self._tokens: tuple[Token, ...] = self._fixed
        self._said = ""
        if file is not None:
            self._signature = _signature(file)
            self._tokens = self._read(file)
        if not self._tokens:
            raise UsageError(f"{file or f'${variable}'} holds no token: {_EXPECTED}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tokens that are valid now."""
        return tuple(token.name for token in self._tokens)

    def find(self, candidate: str) -> Token | None:
        """The token, compared with every one of ours whatever the outcome."""
        digest, found = digest_of(candidate), None
        for token in self._tokens:
            if hmac.compare_digest(digest, token.digest):
                found = token
        return found

    def refresh(self, *, force: bool = False) -> bool:
        """Read the file again where it has changed; True where other tokens hold now.

        A file that is gone or wrong changes nothing: the tokens before it stay, and one line says so. To
        take a token's right away, take its line away.
        """
        if self._file is None:
            return False
        try:
            signature = _signature(self._file)
            if signature == self._signature and not force:
                return False
            self._signature = signature
            tokens = self._read(self._file)
        except UsageError as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("%s; the tokens read before stay valid", error)
            return False
        self._said = ""
        changed = tokens != self._tokens
        self._tokens = tokens
        return changed

    def _read(self, file: Path) -> tuple[Token, ...]:
        try:
            if file.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(f"token_file = {file}: larger than {MAX_FILE_BYTES} bytes")
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"token_file = {file}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"token_file = {file}: not text in UTF-8") from error
        if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
            logger.warning("token_file = %s can be read by other users: chmod 600", file)
        tokens = parse_tokens(text, source=str(file))
        if not tokens:
            raise UsageError(f"token_file = {file}: holds no token: {_EXPECTED}")
        return _merged(self._fixed, tokens, file)


def _merged(first: Sequence[Token], second: Sequence[Token], file: Path) -> tuple[Token, ...]:
    taken = {token.name for token in first}
    for token in second:
        if token.name in taken:
            raise UsageError(
                f"token_file = {file}: {token.name} is the name of a token in the environment too"
            )
    return (*first, *second)


def _signature(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError as error:
        raise UsageError(f"token_file = {file}: cannot be read ({error.strerror})") from error
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
