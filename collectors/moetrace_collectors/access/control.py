"""The one place that says yes or no to a request, for HTTP and gRPC alike; counts every no."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from dataclasses import dataclass

from moetrace_collectors.access.rate_limit import RateLimiter
from moetrace_collectors.access.scopes import Scope, covers
from moetrace_collectors.access.tokens import TokenBook
from moetrace_schemas.enums import RefuseReason

HTTP_STATUS = {
    RefuseReason.NO_TOKEN: 401,
    RefuseReason.UNKNOWN_TOKEN: 401,
    RefuseReason.MISSING_SCOPE: 403,
    RefuseReason.FOREIGN_HOST: 421,
    RefuseReason.CROSS_SITE: 403,
    RefuseReason.RATE_LIMITED: 429,
    RefuseReason.TOO_MANY_CONNECTIONS: 503,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A no, for the one who asked."""

    reason: RefuseReason
    message: str
    """One line; never holds a token."""
    retry_after_s: int = 0

    @property
    def http_status(self) -> int:
        """The status that says so."""
        return HTTP_STATUS[self.reason]


class AccessControl:
    """Rate, token, scope; safe from any thread."""

    def __init__(
        self,
        *,
        tokens: TokenBook | None,
        limiter: RateLimiter,
        on_refused: Callable[[RefuseReason], None],
    ) -> None:
        """Take the rules.

        Args:
            tokens: the collector's; None where everyone who reaches it may ask.
            limiter: of requests per client.
            on_refused: counts.
        """
        self._tokens = tokens
        self._limiter = limiter
        self._on_refused = on_refused

    def check_rate(self, client: str) -> Refusal | None:
        """A refusal where this client asks too often."""
        wait_s = self._limiter.wait_s(client)
        if wait_s <= 0:
            return None
        seconds = max(1, math.ceil(wait_s))
        return self.refuse(
            RefuseReason.RATE_LIMITED,
            f"too many requests from {client}: come back in {seconds} s, or raise client_requests_per_s",
            retry_after_s=seconds,
        )

    def check_token(self, candidate: str | None, scope: Scope) -> Refusal | None:
        """A refusal where this token does not give this scope."""
        if self._tokens is None:
            return None
        if not candidate:
            return self.refuse(
                RefuseReason.NO_TOKEN,
                f"a token with scope {scope} is needed: send Authorization: Bearer TOKEN "
                "(in a browser: any user name, the token as password)",
            )
        token = self._tokens.find(candidate)
        if token is None:
            return self.refuse(RefuseReason.UNKNOWN_TOKEN, "this token is not known here")
        if not covers(token.scopes, scope):
            has = ", ".join(sorted(token.scopes))
            return self.refuse(
                RefuseReason.MISSING_SCOPE, f"token {token.name} has scope {has}, {scope} is needed here"
            )
        return None

    def refuse(self, reason: RefuseReason, message: str, *, retry_after_s: int = 0) -> Refusal:
        """A refusal, counted."""
        self._on_refused(reason)
        return Refusal(reason=reason, message=message, retry_after_s=retry_after_s)

    def count(self, reason: RefuseReason) -> None:
        """Count what is turned away without an answer."""
        self._on_refused(reason)


def open_access() -> AccessControl:
    """Everyone may ask, as often as they like; for tests and for serving without a collector."""
    return AccessControl(
        tokens=None,
        limiter=RateLimiter(per_second=0.0, burst=1, clock_ns=lambda: 0),
        on_refused=lambda reason: None,
    )


def token_of(authorization: str, clickhouse_key: str = "") -> str | None:
    """The token that a request shows; None where it shows none.

    Args:
        authorization: the header: `Bearer TOKEN`, or `Basic` with the token as password, which browsers and
            ClickHouse drivers can send.
        clickhouse_key: the header X-ClickHouse-Key, which other ClickHouse drivers send.
    """
    kind, _, rest = authorization.strip().partition(" ")
    rest = rest.strip()
    if kind.lower() == "bearer":
        return rest or None
    if kind.lower() == "basic":
        try:
            pair = base64.b64decode(rest, validate=True).decode()
        except (binascii.Error, ValueError):
            return rest or None
        user, _, password = pair.partition(":")
        return password or user or None
    return clickhouse_key or None
