"""Certificates for tests: an authority, a server on loopback, a client, and an authority nobody trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files."""

    ca: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path
    foreign_certificate: Path
    """Of a client whose authority is another one."""
    foreign_key: Path


def write_pair(authority: trustme.CA, directory: Path, name: str, *identities: str) -> tuple[Path, Path]:
    """A certificate with its chain, and its key."""
    made = authority.issue_cert(*identities)
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    made.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    return certificate, key


def make_certificates(directory: Path) -> Certificates:
    """All of them, in a folder."""
    authority, foreign = trustme.CA(), trustme.CA()
    ca = directory / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate, key = write_pair(authority, directory, "server", "127.0.0.1", "localhost")
    client_certificate, client_key = write_pair(authority, directory, "client", "rank-0.example")
    foreign_certificate, foreign_key = write_pair(foreign, directory, "foreign", "rank-0.example")
    return Certificates(
        ca=ca,
        certificate=certificate,
        key=key,
        client_certificate=client_certificate,
        client_key=client_key,
        foreign_certificate=foreign_certificate,
        foreign_key=foreign_key,
    )
