"""The HTTP session under the OTLP exporter, made cheap: it works in the model's own process.

The exporter of opentelemetry compresses at gzip's level 9, which for packed columns takes twenty to a
hundred times as long as level 1 to save a tenth of the bytes (benchmarks/wire_size.py); and requests looks up
proxies, certificates and passwords and prepares everything anew for every request, which takes longer than
the request. This session compresses at level 1, and once a request to an address has been taken, those like
it go to the same connection pool of urllib3 without all that. Whatever is not plain (a proxy, cookies, a
redirect, a failure) goes through requests as ever.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import Any

import requests
import urllib3

LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """How a request was sent that was taken, for those that differ in their body only."""

    request: requests.PreparedRequest
    options: dict[str, Any]
    """As given for it, without body and timeout."""
    pool: Any
    """The pool of urllib3, with its certificates."""


class QuickSession(requests.Session):
    """Compresses every body of bytes; for an exporter that is told not to compress."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}
        """What the environment says about an address."""
        self._routes: dict[str, _Route] = {}
        self._options: dict[str, Any] = {}
        """Of the request that is being sent. One thread sends."""

    def request(self, method: str | bytes, url: str | bytes, **options: Any) -> requests.Response:  # type: ignore[override]
        """As `requests.Session.request`, with a compressed body."""
        body = options.pop("data", None)
        if not isinstance(body, bytes) or not isinstance(url, str):
            return super().request(method, url, data=body, **options)
        body = gzip.compress(body, LEVEL)
        options["headers"] = {**(options.get("headers") or {}), "Content-Encoding": "gzip"}
        timeout = options.pop("timeout", None)
        route = self._routes.get(url)
        if route is not None and route.request.method == method and route.options == options:
            answer = self._send_along(route, body, timeout)
            if answer is not None:
                return answer
            del self._routes[url]
        self._options = options
        return super().request(method, url, data=body, timeout=timeout, **options)

    def send(self, request: requests.PreparedRequest, **named: Any) -> requests.Response:
        """As `requests.Session.send`; notes the way of what was taken."""
        response = super().send(request, **named)
        url = request.url or ""
        proxy = requests.utils.select_proxy(url, named.get("proxies"))  # type: ignore[no-untyped-call, unused-ignore]
        adapter: Any = self.get_adapter(url)
        # Older releases of requests make their pools in another way.
        pool_of = getattr(adapter, "get_connection_with_tls_context", None)
        plain = 200 <= response.status_code < 300 and not response.history
        if plain and not proxy and not self.cookies and pool_of is not None:
            pool = pool_of(request, named.get("verify", True), cert=named.get("cert"))
            self._routes[url] = _Route(request=request, options=self._options, pool=pool)
        return response

    def _send_along(self, route: _Route, body: bytes, timeout: Any) -> requests.Response | None:
        """Send a body the known way; None where the answer is not plain, or none came."""
        request = route.request.copy()
        request.headers["Content-Length"] = str(len(body))
        if callable(self.auth):
            self.auth(request)
        try:
            answer = route.pool.urlopen(
                request.method,
                request.path_url,
                body=body,
                headers=request.headers,
                timeout=urllib3.Timeout(connect=timeout, read=timeout),
                retries=False,
                redirect=False,
                assert_same_host=False,
            )
        except urllib3.exceptions.NewConnectionError:
            return None  # nobody is there: a kind of timeout to urllib3, and it took no time
        except urllib3.exceptions.TimeoutError as error:
            # Not once more: a request may last that long, and no longer.
            del self._routes[request.url or ""]
            raise requests.exceptions.Timeout(error, request=request) from error
        except (urllib3.exceptions.HTTPError, OSError):
            # Sent once more through requests: that says what is wrong in words that its callers know.
            return None
        if 300 <= answer.status < 400:
            return None
        response = requests.Response()
        response.status_code, response.reason = answer.status, answer.reason
        response.headers.update(answer.headers)
        response.url, response.request = request.url or "", request
        response._content = answer.data
        for hook in self.hooks["response"]:
            hook(response)
        return response

    def close(self) -> None:
        """Close all connections."""
        self._routes.clear()
        super().close()

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """Proxies and certificates of the environment, as they were at the first request."""
        if url not in self._settings:
            self._settings[url] = super().merge_environment_settings(url, proxies, stream, verify, cert)
        return dict(self._settings[url])
