"""`moetrace query`: SQL over a run, through its collector while one lives, else from its store."""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from moetrace_collectors import interrupts, owner
from moetrace_collectors.access.client import client_access, explain
from moetrace_collectors.errors import UsageError
from moetrace_collectors.read_only_query import (
    EmbeddedQueryRunner,
    Query,
    QueryError,
    QueryLimits,
    ServerQueryRunner,
)
from moetrace_collectors.run_directory import RunDirectory, newest_run_directory, open_run_directory
from moetrace_collectors.store import StoreAddress, escape_parameter, first_line, open_client, parse_store
from moetrace_schemas.clickhouse import cookbook

HELP = "run a read-only SQL query over a run"
TIMEOUT_S = 300.0
UNKNOWN_TABLE = 60
"""ClickHouse's number."""
LIMITS = QueryLimits(
    timeout_s=TIMEOUT_S, max_memory_bytes=8 * 2**30, max_result_rows=2**40, max_result_bytes=2**40
)
"""For a store opened here: a person waits for the answer, and nobody else is slowed down."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "sql",
        nargs="?",
        metavar="SQL",
        help='as in "SELECT * FROM step_verdicts LIMIT 10"; - reads stdin',
    )
    parser.add_argument(
        "--cookbook",
        nargs="?",
        const="",
        metavar="NAME",
        help="run a question of the cookbook instead, over the newest run or --param run=ID; "
        "without a name: list them",
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a {NAME:Type} placeholder; several allowed",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--dir", type=Path, metavar="DIR", help="run directory (default: the newest one)")
    target.add_argument("--dsn", help="store: chdb:///path, clickhouse://host:port or https://host:port")
    target.add_argument("--url", help="a running collector, as in http://127.0.0.1:4318")
    parser.add_argument("--database", default="moetrace", help="database of the tables (default: moetrace)")
    parser.add_argument(
        "--format",
        default="PrettyCompact",
        metavar="FORMAT",
        help="ClickHouse format: Pretty, JSON, CSVWithNames, TSV, Vertical, ... (default: PrettyCompact)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the result; 0, or 1 where the query failed."""
    if arguments.cookbook == "":
        print(_cookbook())
        return 0
    try:
        query = _query(arguments)
        _say_steps(arguments)
        result = _result(arguments, query)
    except QueryError as error:
        print(f"moetrace: {first_line(error, limit=1000)}", file=sys.stderr)
        if error.code == UNKNOWN_TABLE and arguments.cookbook is not None:
            print(
                "moetrace: the store's tables are of an older version: moetrace migrate with --dir or --dsn "
                "makes what is missing",
                file=sys.stderr,
            )
        return 1
    sys.stdout.buffer.write(result)
    if result and not result.endswith(b"\n"):
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    if arguments.cookbook is not None and not result.strip():
        asked = ", ".join(f"{name}={value}" for name, value in query.parameters.items())
        print(f"moetrace: no row answers that ({asked}); others: --param NAME=VALUE", file=sys.stderr)
    return 0


def _say_steps(arguments: argparse.Namespace) -> None:
    """Which steps a question of the cookbook counts, beside its answer."""
    if arguments.cookbook is not None:
        for note in cookbook.recipe(arguments.cookbook).notes:
            if note.startswith("Steps: "):
                print(note, file=sys.stderr)


def _query(arguments: argparse.Namespace) -> Query:
    parameters = dict(_parameter(option) for option in arguments.param)
    if (arguments.sql is None) == (arguments.cookbook is None):
        raise UsageError("what to ask? give SQL, or --cookbook NAME (--cookbook alone lists them)")
    if arguments.cookbook is not None:
        try:
            recipe = cookbook.recipe(arguments.cookbook)
            parameters = recipe.parameters(parameters)
        except cookbook.CookbookError as error:
            raise UsageError(str(error)) from error
        sql = recipe.sql
        if "run" in recipe.placeholders and "run" not in parameters:
            parameters["run"] = _newest_run(arguments)
    else:
        sql = _from_stdin() if arguments.sql == "-" else arguments.sql
    return Query(
        sql=sql,
        format=arguments.format,
        database=arguments.database,
        parameters={name: escape_parameter(value) for name, value in parameters.items()},
        settings={},
    )


def _from_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input, byte {error.start}: text in UTF-8 expected") from None


def _parameter(option: str) -> tuple[str, str]:
    name, equals, value = option.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--param {option}: NAME=VALUE expected, as in run=my-run")
    return name, value


def _newest_run(arguments: argparse.Namespace) -> str:
    found = _result(
        arguments,
        Query(
            sql=cookbook.NEWEST_RUN,
            format="TabSeparatedRaw",
            database=arguments.database,
            parameters={},
            settings={},
        ),
    )
    run_id = found.decode().strip()
    if not run_id:
        raise UsageError("the store holds no run yet: nothing has been stored there")
    return run_id


def _cookbook() -> str:
    lines = []
    for recipe in cookbook.recipes():
        takes = " ".join(f"{name}={recipe.defaults.get(name, '')}" for name in recipe.placeholders)
        lines.append(f"{recipe.name:28} {recipe.question}" + (f" [{takes}]" if takes else ""))
    return "\n".join(lines)


def _result(arguments: argparse.Namespace, query: Query) -> bytes:
    if arguments.url:
        return _over_http(arguments.url, query)
    if arguments.dsn:
        address = parse_store(arguments.dsn)
        if address.embedded_path is None:
            return _on_server(address, query)
        return _embedded(RunDirectory(path=address.embedded_path.parent), address, query)
    directory = open_run_directory(arguments.dir) if arguments.dir else newest_run_directory()
    return _embedded(directory, parse_store(directory.dsn), query)


def _embedded(directory: RunDirectory, address: StoreAddress, query: Query) -> bytes:
    live = directory.live_owner()
    if live is not None:
        return _over_http(live.http_address, query)
    if not address.embedded_path or not address.embedded_path.is_dir():
        # The engine would make an empty store there.
        raise UsageError(f"no store at {address.display}: give a run directory with --dir")
    # The embedded engine takes its time zone from the process; the tables are in UTC.
    os.environ["TZ"] = "UTC"
    time.tzset()
    ownership = owner.acquire(directory.path, address)
    try:
        client = open_client(address)
        try:
            runner = EmbeddedQueryRunner(address, database=query.database, limits=LIMITS)
            with interrupts.deadly():
                return runner.run(query)
        finally:
            client.close()
    finally:
        ownership.release()


def _on_server(address: StoreAddress, query: Query) -> bytes:
    client = open_client(address)
    try:
        return ServerQueryRunner(client, database=query.database, limits=LIMITS).run(query)
    finally:
        client.close()


def _over_http(url: str, query: Query) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url}: a collector's address as in http://127.0.0.1:4318 expected")
    bound = {f"param_{name}": value for name, value in query.parameters.items()}
    parameters = urllib.parse.urlencode({"default_format": query.format, "database": query.database, **bound})
    request = urllib.request.Request(
        f"{url.rstrip('/')}/?{parameters}",
        data=query.sql.encode(),
        headers={"Content-Type": "text/plain; charset=utf-8"},
        method="POST",
    )
    try:
        return client_access().fetch(request, timeout_s=TIMEOUT_S)
    except UsageError:
        raise
    except urllib.error.HTTPError as error:
        if (told := explain(url, error)) is not None:
            raise UsageError(told) from error
        text = error.read().decode(errors="replace")
        raise QueryError(first_line(text, limit=1000), status=error.code) from error
    except (OSError, ValueError) as error:
        if (told := explain(url, error)) is not None:
            raise UsageError(told) from error
        reason = getattr(error, "reason", error)
        raise UsageError(f"no collector answers at {url} ({reason}): check --url, or give --dir") from error
