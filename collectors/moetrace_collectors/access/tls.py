"""The server's certificate and, for mutual TLS, the authority of its clients; for HTTP and gRPC alike."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrace_collectors.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files."""

    certificate: Path
    """The server's certificate with its chain."""
    key: Path
    client_ca: Path | None = None
    """Authorities of client certificates; with it every client must show one."""


class ServerTls:
    """TLS 1.2 or newer; certificate and key are read again when they have changed."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            UsageError: a file is missing, is not PEM, or key and certificate do not belong together.
        """
        self._files = files
        self._signature = self._stat()
        self.context = _context(files)
        self._pems = self._read()
        self._said = ""

    def refresh(self) -> bool:
        """Take a renewed certificate; one that does not load changes nothing, and one line says so.

        Connections that are open keep the certificate they began with. Authorities of clients are read at
        start only: OpenSSL can add one to a running context, and not take one away.
        """
        try:
            signature = self._stat()
            if signature == self._signature:
                return False
            self._signature = signature
            # A context of its own first: half a pair in the running one would break every handshake.
            _context(self._files)
            self.context.load_cert_chain(self._files.certificate, self._files.key)
            self._pems = self._read()
        except (UsageError, OSError) as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("%s; the certificate read before stays in use", error)
            return False
        self._said = ""
        return True

    def grpc_credentials(self) -> Any:
        """Server credentials that follow `refresh`. Any, because grpc is imported only here."""
        import grpc

        last = self._pems

        def fetch() -> Any:
            nonlocal last
            if self._pems is last:
                return None
            last = self._pems
            return configuration(last)

        def configuration(pems: tuple[bytes, bytes, bytes | None]) -> Any:
            certificate, key, client_ca = pems
            return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

        return grpc.dynamic_ssl_server_credentials(
            configuration(last), fetch, require_client_authentication=self._files.client_ca is not None
        )

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        files = self._files
        try:
            client_ca = files.client_ca.read_bytes() if files.client_ca is not None else None
            return files.certificate.read_bytes(), files.key.read_bytes(), client_ca
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be read ({error.strerror})") from error

    def _stat(self) -> tuple[int, ...]:
        marks: list[int] = []
        for name, path in (("tls_certificate", self._files.certificate), ("tls_key", self._files.key)):
            try:
                status = path.stat()
            except OSError as error:
                raise UsageError(f"{name} = {path}: cannot be read ({error.strerror})") from error
            marks += (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        return tuple(marks)


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").replace("_", " ").lower()
        raise UsageError(
            f"tls_certificate = {files.certificate}, tls_key = {files.key}: {reason}; "
            "a PEM certificate and the PEM key that belongs to it expected"
        ) from error
    except OSError as error:
        raise UsageError(f"tls_certificate, tls_key: cannot be read ({error.strerror})") from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except ssl.SSLError as error:
            raise UsageError(f"tls_client_ca = {files.client_ca}: PEM certificates expected") from error
        except OSError as error:
            raise UsageError(
                f"tls_client_ca = {files.client_ca}: cannot be read ({error.strerror})"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    # Without this OpenSSL asks on the terminal, and a service waits for ever.
    raise UsageError("tls_key is encrypted: give a key without a password, readable by the collector only")
