"""A collector with TLS and tokens, and every client that has to get through: as processes, over the wire."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import clickhouse_connect
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from certificates import Certificates, make_certificates
from integration.collector_process import CollectorProcess, collector, environment, moetrace
from moetrace_collectors.access.client import CA_FILE, TOKEN, TOKEN_FILE
from moetrace_collectors.testing import SyntheticRun, request

RUN = SyntheticRun(run_id="access", world_size=1, num_layers=1)
INGEST, READ, ADMIN, EXTRA = "ingest" * 6, "read" * 8, "admin" * 6, "extra" * 6
TOKENS = f"ranks ingest {INGEST}\npeople read {READ}\n"
PATHS = ("/", "/ping", "/metrics", "/v1/traces", "/ui/", "/anything", "/-/reload")
RANK = """
import os, moetrace
from moetrace.record.types import StepRecord
tracer = moetrace.init(run_id="access", rank=0, world_size=1, endpoint=os.environ["ENDPOINT"], sample="1/1",
    export_timeout_s=5.0, **eval(os.environ["SETTINGS"]))
with moetrace.step(0):
    with moetrace.phase("expert_gemm", layer=0):
        pass
moetrace.shutdown()
print(tracer.metrics.exported["otlp"], {str(k): v for k, v in tracer.metrics.dropped.items()})
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of this module."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collector's tokens but one, which is in its environment."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(TOKENS)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def process(
    tmp_path_factory: pytest.TempPathFactory, files: Certificates, token_file: Path
) -> Iterator[CollectorProcess]:
    """A collector that listens on every address, with TLS and tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOETRACE_COLLECTOR_TOKENS", f"boss admin {ADMIN}")
        starting = collector(
            tmp_path_factory.mktemp("run"),
            "--host", "0.0.0.0", "--tls-certificate", str(files.certificate), "--tls-key", str(files.key),
            "--token-file", str(token_file),
        )  # fmt: skip
        running = starting.__enter__()
    try:
        yield running
    finally:
        starting.__exit__(None, None, None)


def address(process: CollectorProcess) -> str:
    """As clients ask: by a name that the certificate is for."""
    return process.http_address.replace("0.0.0.0", "127.0.0.1")


def ask(
    process: CollectorProcess, files: Certificates, path: str, token: str = "", body: bytes | None = None
) -> tuple[int, str]:
    """Status and text."""
    asked = urllib.request.Request(f"{address(process)}{path}", data=body)
    asked.add_header("Content-Type", "application/x-protobuf")
    if token:
        asked.add_header("Authorization", f"Bearer {token}")
    context = ssl.create_default_context(cafile=str(files.ca))
    try:
        with urllib.request.urlopen(asked, timeout=30, context=context) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return moetrace(*arguments)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_but_health_is_open(process: CollectorProcess, files: Certificates, path: str) -> None:
    """Without a token every path is 401, one that does not exist too; health is answered."""
    assert ask(process, files, path)[0] == 401
    assert ask(process, files, path, body=b"")[0] == 401
    assert ask(process, files, "/healthz") == (200, "ok\n")


def test_scopes_hold(process: CollectorProcess, files: Certificates) -> None:
    """Ingest cannot read loads or placements, read cannot write, admin can all; refusals are counted."""
    body = request(RUN.step(0)).SerializeToString()
    assert ask(process, files, "/v1/traces", INGEST, body)[0] == 200
    assert ask(process, files, "/v1/traces", READ, body) == (
        403,
        "token people has scope read, ingest is needed here\n",
    )
    for table in ("expert_loads", "rank_traffic", "rank_steps"):
        assert ask(process, files, f"/?query=SELECT%20count()%20FROM%20{table}", INGEST)[0] == 403
        assert ask(process, files, f"/?query=SELECT%20count()%20FROM%20{table}", READ)[0] == 200
    assert ask(process, files, "/metrics", INGEST)[0] == 403
    assert ask(process, files, "/-/reload", READ, b"")[0] == 403
    assert ask(process, files, "/-/reload", ADMIN, b"") == (200, "read again\n")
    status, metrics = ask(process, files, "/metrics", READ)
    assert status == 200
    counted = {
        line.split('"')[1]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("moetrace_collector_refused_total{")
    }
    assert counted["missing_scope"] >= 6
    assert {"no_token", "unknown_token", "rate_limited", "slow_request"} <= set(counted)


def test_grpc_is_behind_the_same_door(process: CollectorProcess, files: Certificates) -> None:
    """With TLS and a token a call is taken; without the token it is not."""
    port = process.grpc_address.rpartition(":")[2]
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        stub = TraceServiceStub(channel)
        stub.Export(request(RUN.step(1)), timeout=10, metadata=(("authorization", f"Bearer {INGEST}"),))
        with pytest.raises(grpc.RpcError) as error:
            stub.Export(request(RUN.step(2)), timeout=10)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_commands_read_with_a_token_of_the_environment(
    process: CollectorProcess, files: Certificates, tmp_path: Path
) -> None:
    """Query, report and top need token and authority in the environment, and say which is missing."""
    assert ask(process, files, "/v1/traces", INGEST, request(RUN.step(7)).SerializeToString())[0] == 200
    stored, deadline = "/?query=SELECT%20count()%3E0%20FROM%20step_verdicts", time.monotonic() + 20
    while ask(process, files, stored, READ)[1] != "1\n" and time.monotonic() < deadline:
        time.sleep(0.05)
    secret = tmp_path / "token"
    secret.write_text(f"{READ}\n")
    sql = ("query", "SELECT 1 AS one", "--format", "CSV", "--url", address(process))
    variables = {TOKEN_FILE: str(secret), CA_FILE: str(files.ca)}
    done = command(*sql, **variables)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    done = command(
        "report", "--url", address(process), "--out", str(tmp_path / "r.html"), "--json", **variables
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run_id"] == "access"
    done = command("top", "--once", "--url", address(process), **variables)
    assert done.returncode == 0, done.stderr
    assert "rank steps received" in done.stdout
    for given, said in (
        ({CA_FILE: str(files.ca)}, f"set {TOKEN_FILE} (or {TOKEN}) to a token with scope read"),
        ({TOKEN: READ}, f"set {CA_FILE} to its authority"),
        ({CA_FILE: str(files.ca), TOKEN: "wrong" * 6}, "this token is not known here"),
        ({CA_FILE: str(files.ca), TOKEN_FILE: str(tmp_path / "none")}, "none: cannot be read"),
        ({CA_FILE: str(files.key), TOKEN: READ}, "a PEM file of certificates expected"),
    ):
        for arguments in (sql, ("report", "--url", address(process), "--out", str(tmp_path / "r.html"))):
            done = command(*arguments, **given)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert said in done.stderr
            assert READ not in done.stderr


def test_the_clickhouse_driver_shows_the_token_as_password(
    process: CollectorProcess, files: Certificates
) -> None:
    """What Grafana's data source and notebooks do."""
    client = clickhouse_connect.get_client(
        host="127.0.0.1",
        port=int(process.http_address.rpartition(":")[2]),
        interface="https",
        ca_cert=str(files.ca),
        username="anyone",
        password=READ,
        database="moetrace",
    )
    assert client.query("SELECT 1").result_rows == [(1,)]
    client.close()


@pytest.mark.parametrize("by", ["settings", "standard variables", "header"])
def test_a_rank_sends_with_token_and_certificate(
    process: CollectorProcess, files: Certificates, tmp_path: Path, by: str
) -> None:
    """`moetrace.init` with files, with OpenTelemetry's own variables, or with a header: one step arrives."""
    secret = tmp_path / "token"
    secret.write_text(INGEST)
    settings: dict[str, str] = {}
    variables = {"ENDPOINT": address(process)}
    if by == "settings":
        settings = {"token_file": str(secret), "ca_file": str(files.ca)}
    elif by == "header":
        settings = {"headers": f"authorization=Bearer {INGEST}", "ca_file": str(files.ca)}
    else:
        variables |= {
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{INGEST}",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(files.ca),
        }
    assert rank({**variables, "SETTINGS": repr(settings)}) == ("1 {}", "")


def test_a_rank_without_a_token_says_what_is_missing(process: CollectorProcess, files: Certificates) -> None:
    """One warning with the fix; the step is dropped and counted, the model is not touched."""
    settings = {"ca_file": str(files.ca), "shutdown_timeout_s": 3.0}
    out, said = rank({"ENDPOINT": address(process), "SETTINGS": repr(settings)})
    assert out == "0 {'shutdown_deadline': 1}"
    assert "it answers 401: give a token with scope ingest by token_file" in said


def test_a_rank_with_a_certificate_gets_into_a_collector_that_wants_one(
    files: Certificates, tmp_path: Path
) -> None:
    """Mutual TLS without tokens: with client_certificate and client_key a step arrives, without them none."""
    with collector(
        tmp_path / "run",
        "--tls-certificate", str(files.certificate), "--tls-key", str(files.key),
        "--tls-client-ca", str(files.ca),
    ) as process:  # fmt: skip
        settings = {"ca_file": str(files.ca), "shutdown_timeout_s": 3.0}
        own = {"client_certificate": str(files.client_certificate), "client_key": str(files.client_key)}
        for given, exported in (({**settings, **own}, "1"), (settings, "0")):
            out, said = rank({"ENDPOINT": process.http_address, "SETTINGS": repr(given)})
            assert out.split()[0] == exported, said


def rank(variables: dict[str, str]) -> tuple[str, str]:
    """What one rank of one step prints: steps exported and dropped; and its warnings."""
    root = Path(__file__).parents[2]
    known = environment()
    known["PYTHONPATH"] = os.pathsep.join([str(root), known["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        env={**known, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def test_tokens_are_rotated_by_a_signal(
    process: CollectorProcess, files: Certificates, token_file: Path
) -> None:
    """After the file has changed and SIGHUP, the new token holds; the collector runs on."""
    token_file.write_text(f"{TOKENS}extra read {EXTRA}\n")
    process.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while ask(process, files, "/ping", EXTRA)[0] != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(process, files, "/ping", EXTRA) == (200, "Ok.\n")
    assert ask(process, files, "/ping", READ) == (200, "Ok.\n")


def test_no_token_is_written_anywhere(process: CollectorProcess, files: Certificates) -> None:
    """Neither metrics nor a file of the run directory holds a token, also of refused requests."""
    for token in (INGEST, READ, ADMIN, "wrong" * 6):
        ask(process, files, "/v1/traces", token, b"broken")
        ask(process, files, "/?query=SELECT%20nothing", token)
    text = ask(process, files, "/metrics", READ)[1].encode()
    for path in process.directory.rglob("*"):
        if path.is_file() and path.stat().st_size < 10**7:
            text += path.read_bytes()
    assert not any(token.encode() in text for token in (INGEST, READ, ADMIN, "wrong" * 6))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "add tls_certificate and tls_key, and token_file (or tls_client_ca)"),
        (("--host", "192.0.2.1", "--insecure"), "host = '192.0.2.1' is not an address of this machine"),
        (("--token-file", "nowhere"), "token_file = nowhere: cannot be read"),
        (("--tls-certificate", "x.pem"), "tls_certificate and tls_key belong together"),
        (("--tls-certificate", "x.pem", "--tls-key", "x.key"), "tls_certificate = x.pem: cannot be read"),
    ],
)
def test_a_collector_that_cannot_be_safe_does_not_start(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    """Exit 2 and one line that says what to add or mend."""
    done = moetrace("collect", "--dir", str(tmp_path), "--http-port", "0", "--grpc-port", "0", *options)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert said in done.stderr


def test_open_metrics_opens_metrics_only(tmp_path: Path, token_file: Path) -> None:
    """With --open-metrics a scraper needs no token, and everyone else does."""
    with collector(tmp_path, "--token-file", str(token_file), "--open-metrics") as process:
        assert process.get("/metrics").status == 200
        assert process.get("/?query=SELECT%201").status == 401
        assert process.terminate() == 0
