"""The HTTP session under the OTLP exporter, made cheap: it works in the model's own process.

The exporter of opentelemetry compresses at gzip's level 9, which for packed columns takes twenty to a
hundred times as long as level 1 to save a tenth of the bytes (benchmarks/wire_size.py), and requests
looks up the proxies of the environment for every request. This session compresses at level 1, by isal where
it is installed, which takes a half to a fifth of zlib's time for up to a tenth more bytes, and looks them up
once.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import requests

LEVEL = 1
_GZIP_WINDOW = 31


def quickest() -> Callable[[bytes], bytes]:
    """Gzip at level 1, by isal where it is installed (`pip install 'moetrace[gzip]'`), else by zlib."""
    try:
        from isal import isal_zlib
    except ImportError:
        return lambda body: gzip.compress(body, LEVEL)
    return lambda body: bytes(isal_zlib.compress(body, LEVEL, _GZIP_WINDOW))


compress = quickest()


class QuickSession(requests.Session):
    """Compresses every body of bytes; for an exporter that is told not to compress."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[tuple[Any, ...], Any] = {}
        """What the environment says about an address, by all that was asked with it."""

    def request(self, method: str | bytes, url: str | bytes, **options: Any) -> requests.Response:  # type: ignore[override]
        """As `requests.Session.request`, with a compressed body."""
        body = options.get("data")
        if isinstance(body, bytes):
            options["data"] = compress(body)
            options["headers"] = {**(options.get("headers") or {}), "Content-Encoding": "gzip"}
        return super().request(method, url, **options)

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """Proxies and certificates of the environment, as they were at the first request that asked so."""
        asked = (url, tuple(sorted((proxies or {}).items())), stream, verify, cert)
        if asked not in self._settings:
            self._settings[asked] = super().merge_environment_settings(url, proxies, stream, verify, cert)
        return dict(self._settings[asked])
