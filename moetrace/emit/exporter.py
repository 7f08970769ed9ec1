"""The exporter and its session: the token that it shows to the collector, and what that answers."""

from __future__ import annotations

import os
import re
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from moetrace.config import Config
from moetrace.errors import ConfigError

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace.export import SpanExporter

TRACES_PATH = "/v1/traces"

_TLS_REASON = re.compile(r"(certificate verify failed: [\w '.,-]+)")
_ADVICE = {
    401: " (it answers 401: give a token with scope ingest by token_file, or the header authorization)",
    403: " (it answers 403: the token lacks the scope ingest)",
    404: " (it answers HTTP 404: the endpoint is the collector's base URL, to which /v1/traces is added)",
    413: " (it answers 413: a request is larger than it takes)",
    421: " (it answers 421: it listens on loopback only)",
    429: " (it answers 429: it is full, or this host sends too often)",
}


class LastAnswer:
    """What the collector last said, for one line of advice."""

    def __init__(self) -> None:
        self._advice = ""
        self._num_rejected = 0
        self.status: int = 0
        """Of the last request; 0 where there was no answer."""
        self.rejection = ""
        """The collector's words about spans of a request that it took without them."""

    def note(self, response: requests.Response, *_: Any, **__: Any) -> None:
        """A hook of requests: remember the status, and what of a request that was taken was not."""
        self.status = status = response.status_code
        if self.is_elsewhere:
            place = response.headers.get("Location", "another address").partition("?")[0]
            self._advice = f" (it answers HTTP {status}, which names {place}: give that as the endpoint)"
        else:
            self._advice = "" if response.ok else _ADVICE.get(status, f" (it answers HTTP {status})")
        self._num_rejected = 0
        if response.status_code == HTTPStatus.OK and response.content:
            self._note_partial(response.content)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was the word to ask at another address, which nobody follows: nothing was taken."""
        return 300 <= self.status < 400

    @property
    def is_too_large(self) -> bool:
        """Whether the request was refused for its size: the same one never passes."""
        return self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE

    def _note_partial(self, body: bytes) -> None:
        # The exporter of opentelemetry does not look at the body: a span that is rejected is sent to it.
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        try:
            partial = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return
        self._num_rejected = max(0, partial.rejected_spans)
        self.rejection = partial.error_message

    def take_rejected(self) -> int:
        """Spans of the last request that were rejected, told once."""
        num_rejected, self._num_rejected = self._num_rejected, 0
        return num_rejected

    def note_tls(self, error: Exception) -> None:
        """Remember that it did not come to an answer."""
        found = _TLS_REASON.search(str(error))
        reason = found[1] if found else "the handshake failed"
        self._advice = f" (TLS: {reason}: check ca_file, client_certificate and the endpoint's name)"

    def note_no_answer(self, error: Exception) -> None:
        """Remember why there was no connection, or nothing came back."""
        self._advice = f" ({_why_no_answer(error)})"

    def advice(self) -> str:
        """Why it may not take data, in brackets; empty where that is not known."""
        return self._advice


def _why_no_answer(error: BaseException) -> str:
    """The operating system's reason, which requests buries under exceptions of its own."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case ConnectionRefusedError():
                return "the connection is refused: nothing listens there"
            case socket.gaierror():
                return "its name does not resolve"
            case TimeoutError():
                return "no answer within export_timeout_s"
            case OSError(strerror=str(reason)):
                return reason
        cause = cause.__cause__ or cause.__context__
    return f"no answer: {type(error).__name__}"


class TokenFile:
    """Adds the token of a file to every request; the file is read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Read it.

        Raises:
            ConfigError: it cannot be read, or does not hold one token.
        """
        self._path = path
        self._modified = 0
        self._token = ""
        try:
            self._read()
        except OSError as error:
            raise ConfigError(f"token_file={path!r}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise ConfigError(f"token_file={path!r}: {error}") from error

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """See requests' authentication: called for every request, in the exporter's thread."""
        try:
            self._read()
        except (OSError, ValueError):
            # Being replaced this moment, or gone: the token before may still be good.
            pass
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def _read(self) -> None:
        modified = os.stat(self._path).st_mtime_ns
        if modified == self._modified:
            return
        with open(self._path, encoding="ascii") as file:
            words = file.read(4_096).split()
        if len(words) != 1:
            raise ValueError("a file with one token expected")
        self._token, self._modified = words[0], modified


def make_session(config: Config, answers: LastAnswer) -> requests.Session:
    """A session that shows the token and notes the answers.

    Raises:
        ConfigError: the token's file cannot be read.
    """
    import requests

    from moetrace.emit.quick_session import QuickSession

    class Session(QuickSession):
        """Quick, and one where an authority that was chosen for it is the one that holds."""

        def merge_environment_settings(self, *arguments: Any, **named: Any) -> Any:
            """Requests prefers REQUESTS_CA_BUNDLE, meant for the whole process, to the session's own."""
            merged = super().merge_environment_settings(*arguments, **named)
            if isinstance(self.verify, str):
                merged["verify"] = self.verify
            return merged

        def send(self, request: requests.PreparedRequest, **named: Any) -> requests.Response:
            """Note why there is no answer."""
            answers.status = 0
            try:
                return super().send(request, **named)
            except requests.exceptions.SSLError as error:
                answers.note_tls(error)
                raise
            except requests.exceptions.Timeout:
                answers.note_no_answer(TimeoutError())
                raise
            except requests.exceptions.RequestException as error:
                answers.note_no_answer(error)
                raise

    session = Session()
    session.hooks["response"].append(answers.note)
    if config.token_file:
        session.auth = TokenFile(config.token_file)
    return session


def make_exporter(config: Config, session: requests.Session | None = None) -> SpanExporter:
    """OTLP over HTTP with gzip to `config.endpoint`, whether or not that ends with the path of traces.

    What the configuration leaves open (headers, authority, client certificate) the exporter itself takes from
    OTEL_EXPORTER_OTLP_TRACES_* and OTEL_EXPORTER_OTLP_*.
    """
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=config.endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH,
        headers=config.header_map,
        certificate_file=config.ca_file or None,
        client_certificate_file=config.client_certificate or None,
        client_key_file=config.client_key or None,
        timeout=config.export_timeout_s,
        compression=Compression.NoCompression,  # the session does it, quicker
        session=session or make_session(config, LastAnswer()),
    )
