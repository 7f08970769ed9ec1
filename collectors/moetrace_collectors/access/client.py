"""The readers' side: which token, authority and certificate a command shows to a collector.

All of it comes from the environment, so that no token ever stands on a command line, where every user of
the machine can read it, or in a shell's history.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetrace_collectors.access.scopes import Scope
from moetrace_collectors.errors import UsageError

TOKEN = "MOETRACE_TOKEN"
TOKEN_FILE = "MOETRACE_TOKEN_FILE"
CA_FILE = "MOETRACE_CA_FILE"
CERTIFICATE = "MOETRACE_CLIENT_CERTIFICATE"
KEY = "MOETRACE_CLIENT_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess:
    """What a reader shows."""

    token: str = field(default="", repr=False)
    ca_file: str = ""
    """Authority of the collector's certificate; empty: those that the system trusts."""
    certificate: str = ""
    """For a collector that asks its clients for one."""
    key: str = ""
    """Empty where the certificate's file holds the key too."""

    def fetch(self, request: urllib.request.Request, *, timeout_s: float) -> bytes:
        """Send a request; the answer's body.

        Raises:
            UsageError: a file is missing or not what it should be.
            OSError: as `urllib.request.urlopen` does; also where what answers is not HTTP, or broke off.
        """
        try:
            with self._open(request, timeout_s=timeout_s) as answer:
                body: bytes = answer.read()
                return body
        except ConnectionError:
            raise  # of a connection that was closed without an answer, which http.client counts as both
        except http.client.IncompleteRead as error:
            raise urllib.error.URLError(f"its answer broke off after {len(error.partial)} bytes") from error
        except http.client.HTTPException as error:
            # Not the text of the error: it is what came, and may be binary.
            raise urllib.error.URLError("what answers speaks no HTTP; is it the gRPC port?") from error

    def _open(self, request: urllib.request.Request, *, timeout_s: float) -> Any:
        if self.token:
            # Not a plain header: it would follow a redirect to another host.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        if request.type != "https":
            return urllib.request.urlopen(request, timeout=timeout_s)
        return urllib.request.urlopen(request, timeout=timeout_s, context=self._context())

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{CA_FILE} = {self.ca_file}: a PEM file of certificates expected") from error
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key or None)
            except (OSError, ssl.SSLError) as error:
                raise UsageError(
                    f"{CERTIFICATE} = {self.certificate}, {KEY} = {self.key}: a PEM certificate and its key "
                    "expected"
                ) from error
        return context


def client_access(environment: Mapping[str, str] | None = None) -> ClientAccess:
    """What the environment says.

    Raises:
        UsageError: the token's file cannot be read or holds no token.
    """
    environment = os.environ if environment is None else environment
    token = environment.get(TOKEN, "").strip()
    if not token and environment.get(TOKEN_FILE):
        path = Path(environment[TOKEN_FILE])
        try:
            token = path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise UsageError(f"{TOKEN_FILE} = {path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{TOKEN_FILE} = {path}: a file with one token expected") from error
        if not token:
            raise UsageError(f"{TOKEN_FILE} = {path}: holds no token")
    if token.split() != [token] and token:
        raise UsageError(f"{TOKEN} or {TOKEN_FILE}: one token expected, not a list of them")
    return ClientAccess(
        token=token,
        ca_file=environment.get(CA_FILE, ""),
        certificate=environment.get(CERTIFICATE, ""),
        key=environment.get(KEY, ""),
    )


def explain(url: str, error: Exception, *, scope: Scope = Scope.READ) -> str | None:
    """One line of what to do about an answer or failure that is about access; None where it is not."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code != 401:
            return None
        text = error.read().decode(errors="replace").strip().splitlines()
        said = text[0][:200] if text else "HTTP 401"
        return f"{url} says: {said}; set {TOKEN_FILE} (or {TOKEN}) to a token with scope {scope}"
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"{url}: {reason.verify_message}: set {CA_FILE} to its authority, and ask by the name that the "
            "certificate is made for"
        )
    if isinstance(reason, ssl.SSLError):
        told = (reason.reason or str(reason)).replace("_", " ").lower()
        return f"{url}: TLS failed ({told}): check http or https, and {CERTIFICATE} and {KEY}"
    return None
