"""Measures the limit of the server: recorded calls, sent by a driver that does nothing else.

The throughput of a server is more than its clients can use. So the writes of several sessions are
recorded once without a server and encoded exactly as the engine would. The driver only passes them
to libpq, over as many connections as there are clients, each with the next call as soon as the last
one is answered. The clock is fixed, so that each write leaves what the next one expects.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

import psycopg
from psycopg.pq import ExecStatus, Format

from benchmarks.sessions import Writer
from benchmarks.sqlite_turns import Turn
from casstore.engine.compression import Compressor
from casstore.engine.memory import MemoryEngine
from casstore.engine.postgres import request
from casstore.engine.postgres.address import parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.store import Store

_NOW_MS = 1_760_000_000_000
_WRITE = b"write"
Parameters = list[bytes | None]


class _Recorder(MemoryEngine):
    """A memory engine that records the writes."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: _NOW_MS)
        self.writes: list[Write] = []

    def write(self, write: Write) -> WriteResult:
        """Run the write and record it."""
        self.writes.append(write)
        return super().write(write)


def _writes(turns: Sequence[Turn], session: str) -> list[Write]:
    """All writes for committing these turns to a new session."""
    engine = _Recorder()
    writer = Writer(Store(engine).session(session))
    for turn in turns:
        writer.commit(turn)
    return engine.writes


class Replay:
    """Connections to a store, each with the calls of one session."""

    def __init__(self, url: str, sessions: Sequence[Sequence[Turn]]) -> None:
        engine = PostgresEngine(parse(url))
        call, store = engine.write_call, engine.store_number
        engine.close()
        compressor = Compressor(lambda number: b"")
        self._formats = call.formats
        self._connections = []
        self._calls: list[list[Parameters]] = []
        for number, turns in enumerate(sessions):
            client = number.to_bytes(16, "big")
            self._calls.append(
                [
                    request.prepare(write, store, compressor).encoded(
                        client, place, _NOW_MS, lasting=True
                    )
                    for place, write in enumerate(_writes(turns, f"s{number}"), 1)
                ]
            )
            connection = psycopg.connect(parse(url).conninfo, autocommit=True)
            prepared = connection.pgconn.prepare(_WRITE, call.query, call.types)
            assert prepared.status == ExecStatus.COMMAND_OK, prepared.error_message
            self._connections.append(connection)

    def begin(self, each: int) -> None:
        """Send the first calls one after the other: sessions begin with the same object."""
        for connection, calls in zip(self._connections, self._calls, strict=True):
            for parameters in calls[:each]:
                connection.pgconn.send_query_prepared(
                    _WRITE, parameters, self._formats, Format.BINARY
                )
                self._take(connection.pgconn)
            del calls[:each]

    def run(self) -> None:
        """Send the remaining calls, on each connection the next when the last is answered."""
        waiting = {}
        poll = select.poll()
        for connection, calls in zip(self._connections, self._calls, strict=True):
            pgconn = connection.pgconn
            waiting[pgconn.socket] = (pgconn, iter(calls))
            poll.register(pgconn.socket, select.POLLIN)
        for pgconn, left in waiting.values():
            pgconn.send_query_prepared(_WRITE, next(left), self._formats, Format.BINARY)
        while waiting:
            for socket, _ in poll.poll():
                pgconn, left = waiting[socket]
                pgconn.consume_input()
                if pgconn.is_busy():
                    continue
                self._take(pgconn)
                following = next(left, None)
                if following is None:
                    poll.unregister(socket)
                    del waiting[socket]
                else:
                    pgconn.send_query_prepared(_WRITE, following, self._formats, Format.BINARY)

    @staticmethod
    def _take(pgconn: psycopg.pq.abc.PGconn) -> None:
        """Read an answer, and check it: a refused write would be cheaper than a real one."""
        result = pgconn.get_result()
        assert result is not None
        assert result.status == ExecStatus.TUPLES_OK, result.error_message
        answer = request.read_answer(result)
        assert answer.failed is None, answer
        assert answer.missing is None, answer
        assert pgconn.get_result() is None

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()
