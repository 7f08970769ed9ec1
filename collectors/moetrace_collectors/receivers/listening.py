"""Sockets to listen on, and the real reason where there is none."""

from __future__ import annotations

import errno
import socket

from moetrace_collectors.errors import UsageError


def listen(host: str, port: int, *, purpose: str, port_flag: str, backlog: int) -> socket.socket:
    """A listening socket.

    Args:
        host: address or name of this machine.
        port: 0 for any free one.
        purpose: what it is for, for messages.
        port_flag: the flag that chooses another port, for messages.
        backlog: connections that may wait to be accepted.

    Raises:
        UsageError: says whether host or port is to blame.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host = {host!r}: no such address or name ({error})") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise UsageError(_reason(host, port, purpose, port_flag, error)) from error
    return listener


def why_not(host: str, port: int, *, purpose: str, port_flag: str) -> str:
    """Why one cannot listen there, for a server that does not say; found by trying."""
    try:
        listen(host, port, purpose=purpose, port_flag=port_flag, backlog=1).close()
    except UsageError as error:
        return str(error)
    return f"cannot listen on {host}:{port} for {purpose}: no reason given; try again"


def _reason(host: str, port: int, purpose: str, port_flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host = {host!r} is not an address of this machine: give one of its own, or 0.0.0.0 for all"
    fix = f"choose another port with {port_flag} (0 = any free one)"
    if error.errno == errno.EACCES:
        fix = f"ports below 1024 belong to the system: {fix}"
    return f"cannot listen on {host}:{port} for {purpose}: {error.strerror}; {fix}"
