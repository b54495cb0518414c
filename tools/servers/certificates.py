"""Certificates for a test server: an authority of its own, and a server it vouches for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificates(NamedTuple):
    """Files: whom a client trusts, and what a server shows."""

    authority: Path
    certificate: Path
    key: Path


def openssl() -> str | None:
    """The program that makes certificates, if it is installed."""
    return shutil.which("openssl")


def make(place: Path, *, host: str, owner: str | None) -> Certificates:
    """Make both for a server that is reached as ``host``; ``owner`` alone may read the key."""
    authority, authority_key = place / "authority.crt", place / "authority.key"
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", str(authority_key), "-out", str(authority), "-days", "2",
        "-subj", "/CN=an authority for tests", "-addext", "basicConstraints=critical,CA:TRUE",
    )  # fmt: skip
    request, key, certificate = place / "server.csr", place / "server.key", place / "server.crt"
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", str(key), "-out", str(request), "-subj", f"/CN={host}",
    )  # fmt: skip
    names = place / "names"
    names.write_text(f"subjectAltName=DNS:{host}\n")
    _openssl(
        "x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(authority_key),
        "-CAcreateserial", "-out", str(certificate), "-days", "2", "-extfile", str(names),
    )  # fmt: skip
    key.chmod(0o600)
    if owner is not None:
        shutil.chown(key, owner)
        shutil.chown(certificate, owner)
    return Certificates(authority, certificate, key)


def _openssl(*words: str) -> None:
    found = openssl()
    assert found is not None, "openssl is not installed"
    ended = subprocess.run([found, *words], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"openssl {words[0]} failed: {ended.stderr}")
