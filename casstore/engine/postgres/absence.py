"""Why a connection could not be made: a server that is away may come back, a wrong name may not.

The client library keeps the server's code for it to itself, and its words come in the server's
language. So the server is asked once more, in as few bytes as it answers to.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

# Whoever answers does so at once.
_ANSWER_S: Final = 2.0
_MAX_ANSWER_BYTES: Final = 8192
_VERSION_3: Final = 3 << 16
_LENGTH: Final = struct.Struct("!i")
_FIRST: Final = struct.Struct("!ii")
# Still starting or ending, or with as many connections as it may have.
_NOT_NOW: Final = frozenset((b"57P01", b"57P02", b"57P03", b"53300"))
# What is kept for others is told only to who has proven himself: the words are all there is.
_RESERVED: Final = "connection slots"


def may_pass(exc: psycopg.Error, conninfo: str) -> bool:
    """Is it worth trying again to make this connection, which failed with ``exc``?"""
    if isinstance(exc, psycopg.errors.ConnectionTimeout) or _RESERVED in str(exc):
        return True
    tried = exc.pgconn
    if tried is None or not (tried.host or tried.hostaddr):
        # No host of that name, no service, a parameter that makes no sense.
        return False
    try:
        code = _answer_of((tried.hostaddr or tried.host).decode(), int(tried.port))
    except ValueError:
        # A host whose name is no text, or a port that is no number, is not there later either.
        return False
    if code is None or code in _NOT_NOW:
        return True
    # It is there, and speaks: a password or a certificate that it does not take stays wrong.
    return _is_of_another_kind(conninfo)


def _answer_of(host: str, port: int) -> bytes | None:
    """The code with which a server answers a stranger, empty if it lets him on; None: it does not.

    Nothing is told but that somebody is there, so it need not be proven who answers.
    """
    words = b"user\0casstore\0database\0postgres\0\0"
    try:
        with _connected(host, port) as server:
            server.sendall(_FIRST.pack(_FIRST.size + len(words), _VERSION_3) + words)
            kind = server.recv(1)
            if kind != b"E":
                return b"" if kind == b"R" else None
            (size_bytes,) = _LENGTH.unpack(server.recv(_LENGTH.size, socket.MSG_WAITALL))
            wanted = min(size_bytes - _LENGTH.size, _MAX_ANSWER_BYTES)
            fields = server.recv(max(0, wanted), socket.MSG_WAITALL).split(b"\0")
    except (OSError, ValueError, OverflowError, struct.error):
        return None
    return next((field[1:] for field in fields if field.startswith(b"C")), b"")


def _connected(host: str, port: int) -> socket.socket:
    if not host.startswith(("/", "@")):
        return socket.create_connection((host, port), timeout=_ANSWER_S)
    path = f"{host}/.s.PGSQL.{port}"
    server = socket.socket(socket.AF_UNIX)
    try:
        server.settimeout(_ANSWER_S)
        server.connect("\0" + path[1:] if path.startswith("@") else path)
    except BaseException:
        server.close()
        raise
    return server


def _is_of_another_kind(conninfo: str) -> bool:
    """Is there one to connect to, but not a primary, or not a standby, as it is asked for?"""
    if conninfo_to_dict(conninfo).get("target_session_attrs", "any") == "any":
        return False
    try:
        psycopg.connect(conninfo, target_session_attrs="any").close()
    except psycopg.Error:
        return False
    # After a failover somebody is promoted soon.
    return True
