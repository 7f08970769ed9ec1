"""Routes under /ui/: the page, its files, and its JSON. Nothing here writes or loads from elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from hashlib import blake2b
from importlib import resources
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from moetrace_collectors.errors import UsageError
from moetrace_collectors.page.api import ENDPOINTS
from moetrace_collectors.page.query_store import NoAnswerError, QueryStore
from moetrace_collectors.page.request_parameters import BadRequestError, RequestParameters
from moetrace_collectors.read_only_query import QueryRunner

PREFIX = "/ui"
# data: is for plotly, which draws a heat map as a picture; its styles go through a sheet of ours.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_SHARED = "palette.css"
"""Lies with the report, which uses it too."""
PLOTLY = "plotly.min.js"
_WORTH_GZIP = 1_024

logger = logging.getLogger(__name__)


class Page:
    """GET /ui/, /ui/assets/..., /ui/api/..."""

    def __init__(self, queries: QueryRunner, *, database: str) -> None:
        self._store = QueryStore(queries, database=database)

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route(PREFIX, self._redirect, methods=["GET"]),
            Route(f"{PREFIX}/", self._index, methods=["GET"]),
            Route(f"{PREFIX}/assets/{{name}}", self._asset, methods=["GET"]),
            Route(f"{PREFIX}/api/{{name}}", self._api, methods=["GET"]),
        ]

    async def _redirect(self, request: Request) -> Response:
        # Relative, so that it holds behind a proxy that serves the collector under a path of its own.
        return RedirectResponse("ui/")

    async def _index(self, request: Request) -> Response:
        return await self._file(request, "index.html")

    async def _asset(self, request: Request) -> Response:
        return await self._file(request, request.path_params["name"])

    async def _file(self, request: Request, name: str) -> Response:
        found = await asyncio.to_thread(_read, name)
        if found is None:
            return _refuse(404, f"no file {name[:80]!r} in this page")
        body, packed, tag = found
        headers = {**_SECURITY, "ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        media_type = f"{_TYPES.get(Path(name).suffix, 'application/octet-stream')}; charset=utf-8"
        if _takes_gzip(request):
            return Response(packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=media_type)
        return Response(body, headers=headers, media_type=media_type)

    async def _api(self, request: Request) -> Response:
        endpoint = ENDPOINTS.get(request.path_params["name"])
        if endpoint is None:
            return _refuse(404, f"no such endpoint; there are {', '.join(sorted(ENDPOINTS))}")
        try:
            parameters = RequestParameters(request.query_params)
            # Not the pool that decodes requests: slow queries must not keep ranks waiting.
            document = await asyncio.to_thread(endpoint, self._store, parameters)
        except NoAnswerError as error:
            return _refuse(error.status, str(error))
        except BadRequestError as error:
            return _refuse(400, str(error))
        except UsageError as error:
            return _refuse(404, str(error))
        return await asyncio.to_thread(_json, document, 200, _takes_gzip(request))


def _refuse(status: int, message: str) -> Response:
    return _json({"error": message}, status, False)


def _json(document: Mapping[str, object], status: int, packed: bool) -> Response:
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    headers = {**_SECURITY, "Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if packed and len(body) >= _WORTH_GZIP:
        body = gzip.compress(body, compresslevel=1)
        headers["Content-Encoding"] = "gzip"
    return Response(body, status, headers=headers, media_type="application/json")


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


@lru_cache(maxsize=64)
def _read(name: str) -> tuple[bytes, bytes, str] | None:
    """A file of the page as it is, packed, and its tag; None where there is none of that name."""
    if name == PLOTLY:
        body = _plotly()
    elif name == _SHARED:
        body = resources.files("moetrace_collectors.views").joinpath("assets", name).read_bytes()
    elif name in _names():
        body = resources.files(__package__).joinpath("assets", name).read_bytes()
    else:
        return None
    if body is None:
        return None
    return (
        body,
        gzip.compress(body, compresslevel=6, mtime=0),
        f'"{blake2b(body, digest_size=8).hexdigest()}"',
    )


@cache
def _names() -> frozenset[str]:
    return frozenset(entry.name for entry in resources.files(__package__).joinpath("assets").iterdir())


def _plotly() -> bytes | None:
    # Found without importing it, which takes half a second and is no use here.
    found = importlib.util.find_spec("plotly")
    for location in (found.submodule_search_locations if found else None) or ():
        path = Path(location) / "package_data" / PLOTLY
        if path.is_file():
            return path.read_bytes()
    logger.warning("the page draws no heat maps: plotly is not installed (pip install 'moetrace[collector]')")
    return None
