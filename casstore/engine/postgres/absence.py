"""Decides whether a failed connection is worth retrying: not if a name or password is wrong.

libpq does not expose the server's error code for a failed connection, and its message is in the
server's language. So this module connects once more by itself, sends the shortest valid startup
message, and reads the code from the answer.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

# A server that accepts connections answers quickly.
_ANSWER_S: Final = 2.0
_MAX_ANSWER_BYTES: Final = 8192
_VERSION_3: Final = 3 << 16
_LENGTH: Final = struct.Struct("!i")
_FIRST: Final = struct.Struct("!ii")
# Starting up, shutting down, or too many connections.
_NOT_NOW: Final = frozenset((b"57P01", b"57P02", b"57P03", b"53300"))
# Reserved connection slots are reported only after authentication, so only the message text
# identifies this case.
_RESERVED: Final = "connection slots"


def may_pass(exc: psycopg.Error, conninfo: str) -> bool:
    """True if it is worth retrying the connection that failed with ``exc``."""
    if isinstance(exc, psycopg.errors.ConnectionTimeout) or _RESERVED in str(exc):
        return True
    tried = exc.pgconn
    if tried is None or not (tried.host or tried.hostaddr):
        # An unknown host or service, or an invalid parameter.
        return False
    try:
        code = _answer_of((tried.hostaddr or tried.host).decode(), int(tried.port))
    except ValueError:
        # An invalid host name or port number stays invalid.
        return False
    if code is None or code in _NOT_NOW:
        return True
    # The server answers, so the cause is permanent (a wrong password or certificate), unless the
    # server has the wrong role.
    return _is_of_another_kind(conninfo)


def _answer_of(host: str, port: int) -> bytes | None:
    """The server's error code for a startup message; empty if it accepts, None if no answer comes.

    The message contains nothing confidential, so the server's identity need not be checked.
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
    """True if a server accepts connections but has the wrong role (primary or standby)."""
    if conninfo_to_dict(conninfo).get("target_session_attrs", "any") == "any":
        return False
    try:
        psycopg.connect(conninfo, target_session_attrs="any").close()
    except psycopg.Error:
        return False
    # After a failover a standby is promoted soon.
    return True
