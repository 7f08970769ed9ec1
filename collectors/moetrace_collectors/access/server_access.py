"""What a configuration says of who may ask, made ready for a server: tokens, TLS, request rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moetrace_collectors.access.control import AccessControl
from moetrace_collectors.access.rate_limit import RateLimiter
from moetrace_collectors.access.tls import ServerTls
from moetrace_collectors.access.tokens import TokenBook
from moetrace_collectors.config import CollectorConfig
from moetrace_schemas.enums import RefuseReason


class ServerAccess:
    """Behind the gates of one process's servers."""

    def __init__(
        self,
        config: CollectorConfig,
        *,
        clock_ns: Callable[[], int],
        on_refused: Callable[[RefuseReason], None],
    ) -> None:
        """Read tokens and certificate.

        Args:
            config: checked.
            clock_ns: monotonic clock.
            on_refused: told why a request or connection was turned away.

        Raises:
            UsageError: a file does not read.
        """
        self._tokens = None
        if config.token_file or config.environment_tokens:
            self._tokens = TokenBook(
                file=Path(config.token_file) if config.token_file else None,
                environment=config.environment_tokens,
                variable=config.token_variable,
            )
        self.tls = ServerTls(config.tls_files) if config.tls_files is not None else None
        self.control = AccessControl(
            tokens=self._tokens,
            limiter=RateLimiter(
                per_second=config.client_requests_per_s,
                burst=config.client_request_burst,
                clock_ns=clock_ns,
            ),
            on_refused=on_refused,
        )
        self._host = f"[{config.host}]" if ":" in config.host else config.host

    def refresh(self, *, force: bool = False) -> None:
        """Read tokens and certificate again where their files have changed; cheap, to be called often."""
        if self._tokens is not None:
            self._tokens.refresh(force=force)
        if self.tls is not None:
            self.tls.refresh()

    def address(self, port: int) -> str:
        """host:port, as it stands in an address."""
        return f"{self._host}:{port}"

    def url(self, port: int) -> str:
        """Where HTTP is served."""
        return f"{'https' if self.tls is not None else 'http'}://{self.address(port)}"
