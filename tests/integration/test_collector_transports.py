"""OTLP over HTTP and gRPC, and the query endpoint, as real clients use them: one collector for all tests."""

from __future__ import annotations

import gzip
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import clickhouse_connect
import grpc
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from integration.collector_process import CollectorProcess, ask, collector, moetrace
from moetrace_collectors.testing import SyntheticRun, any_value, request
from moetrace_schemas import attributes
from moetrace_schemas.clickhouse.render import migrations
from unit.collectors.test_otlp_body import as_otlp_json

DATA = Path(__file__).parents[1] / "data"
RUN = SyntheticRun(run_id="transports", world_size=1, num_layers=1)
JSON = "application/json"
LIMIT = 100_000


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector with small limits."""
    directory = tmp_path_factory.mktemp("run")
    config = directory / "collector.toml"
    config.write_text(
        f"max_body_bytes = {LIMIT}\nmax_decompressed_bytes = {LIMIT}\nquery_timeout_s = 1.0\n"
        "query_max_result_rows = 5000\nquery_max_memory_bytes = 200_000_000\n"
    )
    with collector(directory, "--config", str(config)) as running:
        yield running


def bad_request() -> ExportTraceServiceRequest:
    """One good rank step and one that the decoder turns away."""
    message = request([*RUN.step(100), *RUN.step(101)])
    message.resource_spans[0].scope_spans[0].spans[1].attributes.add(
        key=attributes.CLOCK, value=any_value("sundial")
    )
    return message


def received(process: CollectorProcess) -> float:
    """Rank steps received so far."""
    return process.metric("moetrace_collector_received_total")


def test_protobuf_is_taken(process: CollectorProcess) -> None:
    """A rank step in protobuf is received, and the answer is an empty OTLP response."""
    before = received(process)
    answer = process.send(request(RUN.step(0)))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-protobuf")
    assert ExportTraceServiceResponse.FromString(answer.body) == ExportTraceServiceResponse()
    assert received(process) == before + 1


def test_json_is_taken(process: CollectorProcess) -> None:
    """A rank step in OTLP/JSON is received, and the answer is JSON."""
    before = received(process)
    answer = process.post(json.dumps(as_otlp_json()).encode(), content_type=JSON)
    assert (answer.status, json.loads(answer.body)) == (200, {})
    assert answer.headers["content-type"] == JSON
    assert received(process) == before + 1


def test_gzip_is_taken(process: CollectorProcess) -> None:
    """A compressed request is received."""
    before = received(process)
    body = gzip.compress(request(RUN.step(2)).SerializeToString())
    assert process.post(body, content_encoding="gzip").status == 200
    assert received(process) == before + 1


def test_grpc_is_taken(process: CollectorProcess) -> None:
    """A rank step over gRPC is received, plain and gzip."""
    before = received(process)
    with grpc.insecure_channel(process.grpc_address) as channel:
        stub = TraceServiceStub(channel)
        stub.Export(request(RUN.step(3)), timeout=10)
        stub.Export(request(RUN.step(4)), timeout=10, compression=grpc.Compression.Gzip)
    assert received(process) == before + 2


def test_foreign_spans_are_accepted(process: CollectorProcess) -> None:
    """The OpenTelemetry example trace is answered with success and counted as foreign."""
    before = process.metric("moetrace_collector_foreign_spans_total")
    answer = process.post((DATA / "otlp" / "trace.json").read_bytes(), content_type=JSON)
    assert (answer.status, json.loads(answer.body)) == (200, {})
    assert process.metric("moetrace_collector_foreign_spans_total") == before + 1


def test_partial_success_says_what_was_rejected(process: CollectorProcess) -> None:
    """With one bad span of two the answer is 200 with the number and the reason of the rejected one."""
    answer = process.send(bad_request())
    partial = ExportTraceServiceResponse.FromString(answer.body).partial_success
    assert (answer.status, partial.rejected_spans) == (200, 1)
    assert partial.error_message == (
        "first: invalid_attribute: moetrace.clock is 'sundial': host, cuda or device expected"
    )
    with grpc.insecure_channel(process.grpc_address) as channel:
        response = TraceServiceStub(channel).Export(bad_request(), timeout=10)
    assert response.partial_success.rejected_spans == 1


@pytest.mark.parametrize(
    ("body", "content_type", "encoding", "status"),
    [
        (b"\xff\xff", "application/x-protobuf", "", 400),
        (b"{", JSON, "", 400),
        (b"", "text/plain", "", 415),
        (b"", JSON, "br", 415),
        (b"not gzip", JSON, "gzip", 400),
        (b"x" * (LIMIT + 1), "application/x-protobuf", "", 413),
        (gzip.compress(b"\0" * 10 * LIMIT), "application/x-protobuf", "gzip", 413),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_and_counted(
    process: CollectorProcess, body: bytes, content_type: str, encoding: str, status: int
) -> None:
    """Each kind of bad request has its HTTP status, an OTLP status message, and counts as one rejection."""
    before = process.metric("moetrace_collector_rejected_total")
    answer = process.post(body, content_type=content_type, content_encoding=encoding)
    assert answer.status == status
    if content_type == JSON:
        assert json_format.Parse(answer.body, Status()).message
    else:
        assert Status.FromString(answer.body).message
    assert process.metric("moetrace_collector_rejected_total") == before + 1


def test_grpc_refuses_what_it_cannot_read(process: CollectorProcess) -> None:
    """Bytes that are no request, and one that is too large, are INVALID_ARGUMENT and counted."""
    before = process.metric("moetrace_collector_rejected_total")
    with grpc.insecure_channel(process.grpc_address) as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        for body in (b"\xff\xff", b"x" * (LIMIT + 1)):
            with pytest.raises(grpc.RpcError) as error:
                export(body, timeout=10)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert process.metric("moetrace_collector_rejected_total") == before + 2


def test_a_grpc_bomb_is_refused(process: CollectorProcess) -> None:
    """A small gzip message that would become huge does not."""
    with grpc.insecure_channel(process.grpc_address) as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        with pytest.raises(grpc.RpcError) as error:
            export(b"\0" * 100 * LIMIT, timeout=10, compression=grpc.Compression.Gzip)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert process.get("/healthz").body == b"ok\n"


def test_a_web_page_under_another_name_is_refused(process: CollectorProcess) -> None:
    """A request whose Host is no loopback name comes from a page that points its own name here."""
    answer = ask(f"{process.http_address}/metrics", None, {"Host": "attacker.example:4318"})
    assert answer.status == 421


def query(process: CollectorProcess, sql: str, **parameters: str) -> tuple[int, str]:
    """Status and text of a query."""
    named = urllib.parse.urlencode(parameters)
    answer = process.post(sql.encode(), path=f"/?{named}", content_type="text/plain")
    return answer.status, answer.body.decode()


def test_queries_answer_like_a_clickhouse_server(process: CollectorProcess) -> None:
    """Query in the URL or the body, a default format, parameters, and another database."""
    assert process.get("/").body == process.get("/ping").body == b"Ok.\n"
    assert process.get("/?query=SELECT%201").body == b"1\n"
    assert query(process, "SELECT 1 AS one", default_format="JSONEachRow") == (200, '{"one":1}\n')
    assert query(process, "SELECT {a:String} AS a FORMAT JSONEachRow", param_a="x\\ty") == (
        200,
        '{"a":"x\\ty"}\n',
    )
    assert query(process, "SELECT count() > 0 FROM one", database="system") == (200, "1\n")
    assert query(
        process,
        "SELECT toUInt64(1) AS n",
        default_format="JSONEachRow",
        output_format_json_quote_64bit_integers="1",
    ) == (200, '{"n":"1"}\n')


@pytest.mark.parametrize(
    ("sql", "status", "text"),
    [
        ("SELECT nothing", 400, "Unknown expression identifier"),
        ("SELEC 1", 403, "only reading is possible here"),
        ("SELECT * FROM nowhere", 404, "nowhere"),
        ("INSERT INTO step_verdicts (run_id) VALUES ('x')", 403, "only reading is possible here"),
        ("WITH 7 AS n INSERT INTO step_verdicts (step) SELECT n", 403, "readonly"),
        ("SELECT file('/etc/hostname')", 403, "file is not available here"),
        ("SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'a String')", 403, "readonly"),
        ("SELECT 1 SETTINGS max_execution_time = 0", 403, "readonly"),
        ("SELECT sleep(3)", 504, "Timeout exceeded"),
        ("SELECT * FROM numbers(20000)", 413, "Limit for result exceeded"),
        ("SELECT groupArray(number) FROM numbers(100000000)", 507, "memory limit exceeded"),
    ],
)
def test_bad_queries_are_answered_with_the_engines_words(
    process: CollectorProcess, sql: str, status: int, text: str
) -> None:
    """Writes, files, addresses and greedy queries are refused, with a status that says so."""
    got = query(process, sql)
    assert got[0] == status
    assert text in got[1]


def test_limits_can_be_tightened_and_not_lifted(process: CollectorProcess) -> None:
    """A client may ask for stricter limits; more than the collector's it does not get."""
    assert query(process, "SELECT * FROM numbers(20)", max_result_rows="10")[0] == 413
    assert query(process, "SELECT * FROM numbers(20000)", max_result_rows="0")[0] == 413
    assert query(process, "SELECT 1", max_execution_time="soon")[0] == 400
    assert query(process, "SELECT 1", default_format="Dataframe")[0] == 400
    assert query(process, "SELECT 1", allow_ddl="1") == (400, "setting allow_ddl = 1 cannot be chosen here\n")


def test_query_takes_a_servers_dsn(process: CollectorProcess) -> None:
    """`moetrace query --dsn` reads a ClickHouse server, read-only; the endpoint passes for one."""
    dsn = f"{process.http_address}/"
    done = moetrace("query", "--dsn", dsn, "SELECT count() AS n FROM schema_migrations", "--format", "CSV")
    assert (done.returncode, done.stdout) == (0, f"{len(migrations())}\n")
    done = moetrace("query", "--dsn", dsn, "SELECT nothing FORMAT TSV")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "Unknown expression identifier" in done.stderr


def test_the_clickhouse_driver_works_over_it(process: CollectorProcess) -> None:
    """clickhouse-connect, as Grafana's or a notebook's driver would, reads tables through the endpoint."""
    address = urllib.parse.urlsplit(process.http_address)
    client = clickhouse_connect.get_client(host=address.hostname, port=address.port, database="moetrace")
    result = client.query(
        "SELECT version, name FROM schema_migrations FINAL WHERE version < {v:UInt32}", {"v": 2}
    )
    assert result.result_rows == [(1, "0001_create_schema_migrations.sql")]
    assert client.command("SELECT count() FROM system.one") == 1
    client.close()


def test_the_driver_streams_blocks_and_reads_every_type(process: CollectorProcess) -> None:
    """Native blocks as a stream, rows, tables of Arrow, parameters of several types, and errors by number."""
    address = urllib.parse.urlsplit(process.http_address)
    with clickhouse_connect.get_client(
        host=address.hostname, port=address.port, database="moetrace", query_limit=0
    ) as client:
        with client.query_row_block_stream("SELECT number FROM numbers(4000)") as stream:
            assert sum(len(block) for block in stream) == 4_000
        [row] = client.query(
            "SELECT {a:Array(UInt32)}, {t:String}, toDateTime64('2030-01-02 03:04:05.123456789', 9, 'UTC'), "
            "map('x', toInt64(-1)), toNullable(NULL::Nullable(Int16)), toLowCardinality('l')",
            {"a": [1, 2], "t": "it's\t\\"},
        ).result_rows
        assert (row[0], row[1], row[3], row[4], row[5]) == ([1, 2], "it's\t\\", {"x": -1}, None, "l")
        assert client.query_arrow("SELECT version FROM schema_migrations FINAL").num_rows == len(migrations())
        assert client.query("SELECT * FROM v_runs LIMIT 0").column_names[0] == "run_id"
        with pytest.raises(DatabaseError, match=r"readonly|only reading"):
            client.command("DROP TABLE step_verdicts")


def test_grafanas_questions_about_tables_are_answered(process: CollectorProcess) -> None:
    """What a data source asks to fill its pickers, and how it sends a panel's query."""
    headers = {"X-ClickHouse-User": "default", "X-ClickHouse-Key": "", "Accept-Encoding": "gzip"}
    for sql in (
        "SELECT displayName(), version(), revision(), timezone()",
        "SELECT 1",
        "SELECT version()",
        "SELECT name FROM system.databases",
        "SELECT name FROM system.tables WHERE database = 'moetrace'",
        'DESC TABLE "moetrace"."step_verdicts"',
        "SHOW TABLES FROM moetrace",
        "/* grafana_user:admin */ SELECT count() FROM moetrace.v_runs",
    ):
        answer = process.post(
            sql.encode(),
            path="/?default_format=JSONCompact&database=moetrace",
            content_type="text/plain",
            **headers,
        )
        assert answer.status == 200, (sql, answer.body)
        assert json.loads(answer.body)["data"], sql


def test_gos_driver_gets_the_blocks_that_it_asks_for(process: CollectorProcess) -> None:
    """The first request of Go's driver, and with it of Grafana's data source: Native of a newer version."""
    answer = process.post(
        b"SELECT displayName(), version(), revision(), timezone()",
        path="/?client_protocol_version=54460&database=moetrace&default_format=Native",
        content_type="text/plain",
        Accept_Encoding="gzip",
    )
    assert answer.status == 200
    # Block info, 4 columns, 1 row, and behind the first column's type the byte that says: nothing custom.
    assert answer.body.startswith(b"\x01\x00\x02\xff\xff\xff\xff\x00\x04\x01\x0ddisplayName()\x06String\x00")
    assert b"\x0arevision()\x06UInt32\x00" in answer.body
    old = process.post(
        b"SELECT 1 AS check",
        path="/?client_protocol_version=54405&default_format=Native",
        content_type="text/plain",
    )
    assert old.body == b"\x01\x01\x05check\x05UInt8\x01"
