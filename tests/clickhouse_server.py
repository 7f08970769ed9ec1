"""A ClickHouse server's HTTP interface before the embedded engine: `python -m clickhouse_server STORE PORT`.

The same engine, asked and written to as a server is: over a connection, with the settings and parameters in
the address, inserts in Native or Arrow, compressed. Prints its port when it is ready; 0 is any free one. It
knows no users, sessions or clusters, and answers uncompressed.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import tempfile
from typing import Any

import chdb
import lz4.frame
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

OF_HTTP = {
    "query", "database", "default_format", "session_id", "query_id", "client_protocol_version", "compress",
    "wait_end_of_query", "enable_http_compression", "send_progress_in_http_headers",
    "http_headers_progress_interval_ms", "cancel_http_readonly_queries_on_client_close",
}  # fmt: skip
"""Parameters of an address that are no settings of a query, or mean nothing here."""
_INSERT = re.compile(rb"\s*INSERT INTO (?P<into>.+) FORMAT (?P<format>\w+)\s*", re.DOTALL)
_CODE = re.compile(r"Code: (\d+)\.")


class Engine:
    """Runs statements, each on a connection of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def run(self, statement: bytes, parameters: dict[str, str]) -> bytes:
        """Answer of a statement, in the format that it names."""
        connection = chdb.connect(self._path)
        try:
            self._set_up(connection, parameters)
            head, _, data = statement.partition(b"\n")
            insert = _INSERT.fullmatch(head)
            if insert is not None:
                self._insert(connection, insert["into"].decode(), insert["format"].decode(), data)
                return b""
            bound = {name[6:]: value for name, value in parameters.items() if name.startswith("param_")}
            found = connection.query(
                statement.decode(), parameters.get("default_format", "TabSeparated"), params=bound
            )
            return bytes(found.bytes() or b"")
        finally:
            connection.close()

    def _set_up(self, connection: Any, parameters: dict[str, str]) -> None:
        connection.query(f"USE `{parameters.get('database', 'default')}`")
        settings = [
            f"{name} = '{value}'"
            for name, value in parameters.items()
            if name not in OF_HTTP and not name.startswith("param_")
        ]
        if settings:
            connection.query(f"SET {', '.join(settings)}")

    def _insert(self, connection: Any, into: str, form: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            connection.query(f"INSERT INTO {into} FROM INFILE '{file.name}' FORMAT {form}")


def application(engine: Engine) -> Starlette:
    """The interface."""

    async def statement(request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "lz4":
            body = lz4.frame.decompress(body)
        query = request.query_params.get("query", "").encode()
        whole = b"\n".join(part for part in (query, body) if part)
        try:
            return Response(await run_in_threadpool(engine.run, whole, dict(request.query_params)))
        except RuntimeError as error:
            code = _CODE.search(str(error))
            headers = {"X-ClickHouse-Exception-Code": code[1] if code else "1"}
            return PlainTextResponse(f"{error}\n", 500, headers=headers)

    async def ping(request: Request) -> Response:
        return PlainTextResponse("Ok.\n")

    return Starlette(routes=[Route("/ping", ping), Route("/", statement, methods=["GET", "POST"])])


def main(path: str, port: str) -> None:
    """Serve until the process is ended."""
    listener = socket.create_server(("127.0.0.1", int(port)))
    keeper = chdb.connect(path)  # the engine stays open between statements
    server = uvicorn.Server(uvicorn.Config(application(Engine(path)), log_level="warning"))
    print(listener.getsockname()[1], flush=True)
    asyncio.run(server.serve(sockets=[listener]))
    keeper.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
