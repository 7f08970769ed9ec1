"""Whether a collector may listen where it is told: on loopback, or with TLS and a proof of who asks."""

from __future__ import annotations

import ipaddress

from moetrace_collectors.errors import UsageError


def is_loopback(host: str) -> bool:
    """Whether a host is a spelling of this machine that no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_posture(*, host: str, tls: bool, client_ca: bool, tokens: bool, insecure: bool) -> None:
    """Refuse to listen in the open.

    Args:
        host: address to listen on.
        tls: whether a certificate and its key are given.
        client_ca: whether clients must show a certificate.
        tokens: whether tokens are given.
        insecure: whether the user said that the network is trusted.

    Raises:
        UsageError: reachable from other machines without TLS, or without knowing who asks; says what to add.
    """
    if insecure or is_loopback(host):
        return
    missing = []
    if not tls:
        missing.append("tls_certificate and tls_key")
    if not tokens and not client_ca:
        missing.append("token_file (or tls_client_ca)")
    if missing:
        raise UsageError(
            f"host = {host!r} is reachable from other machines: add {', and '.join(missing)}; "
            "or keep 127.0.0.1, or add --insecure on a network you trust"
        )
