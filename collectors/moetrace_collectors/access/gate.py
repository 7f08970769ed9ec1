"""In front of every HTTP route: Host, origin, rate, token and scope, in this order. An ASGI application."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetrace_collectors.access.control import AccessControl, Refusal, token_of
from moetrace_collectors.access.posture import is_loopback
from moetrace_collectors.access.scopes import RouteScopes, scope_of
from moetrace_schemas.enums import RefuseReason

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_ANSWER_HEADERS = (
    # What a query returns is data, whatever it looks like.
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


class AccessGate:
    """Refuses what has no right, before a byte of its body is read."""

    def __init__(
        self, app: ASGIApp, *, control: AccessControl, scopes: RouteScopes, loopback_only: bool
    ) -> None:
        """Stand in front of `app`.

        Args:
            app: all routes.
            control: tokens and rates.
            scopes: of the routes that do not ask for `read`.
            loopback_only: whether the server listens on loopback, where a foreign Host is a web page that
                points its own name at this machine.
        """
        self._app = app
        self._control = control
        self._scopes = scopes
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            # There is no route for anything else.
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", ())}
                message = {
                    **message,
                    "headers": [
                        *message.get("headers", ()),
                        *(pair for pair in _ANSWER_HEADERS if pair[0] not in given),
                    ],
                }
            await send(message)

        refusal = self._check(scope, headers)
        if refusal is not None:
            await _answer(refusal)(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            # Only a server that stops cancels, what is out of time: its client is cut off by then.
            return

    def _check(self, scope: Scope, headers: dict[str, str]) -> Refusal | None:
        if self._loopback_only and not is_loopback(_without_port(headers.get("host", "localhost"))):
            return self._control.refuse(
                RefuseReason.FOREIGN_HOST, "this collector listens on loopback only: ask it as 127.0.0.1"
            )
        if _is_cross_site(scope["method"], headers):
            return self._control.refuse(
                RefuseReason.CROSS_SITE, "a page of another site may link here, and not ask in its own name"
            )
        wanted = scope_of(scope["path"], self._scopes)
        if wanted is None:
            return None
        client = scope["client"][0] if scope.get("client") else ""
        return self._control.check_rate(client) or self._control.check_token(
            token_of(headers.get("authorization", ""), headers.get("x-clickhouse-key", "")), wanted
        )


def _answer(refusal: Refusal) -> PlainTextResponse:
    headers = {}
    if refusal.http_status == 401:
        # A browser asks its user for the token, and keeps it for this origin until it is closed.
        headers["WWW-Authenticate"] = 'Basic realm="moetrace", charset="UTF-8"'
    if refusal.retry_after_s:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return PlainTextResponse(f"{refusal.message}\n", refusal.http_status, headers=headers)


def _is_cross_site(method: str, headers: dict[str, str]) -> bool:
    """Whether a browser asks on behalf of another site's page.

    Browsers send the token that they keep by themselves, so a foreign page could make them use it. A link
    that a person follows is fine: the foreign page never sees the answer.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        if site in ("same-origin", "none"):
            return False
        follows_link = (
            method == "GET"
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        return not follows_link
    # Older browsers.
    origin = headers.get("origin")
    if method in _SAFE_METHODS or origin is None:
        return False
    try:
        return urlsplit(origin).netloc != headers.get("host", "")
    except ValueError:
        return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
