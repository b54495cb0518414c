"""Transactions that stay open while others go on: how races become stories with an order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from casstore.engine.postgres import request
from casstore.engine.postgres.connections import Client
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.postgres.schema import encoded
from casstore.engine.protocol import Write
from casstore.testing.engine_threads import TIMEOUT_S, start

_LOOK_S = 0.001


class Blocked:
    """Tells whether a connection waits for another one."""

    def __init__(self, engine: PostgresEngine) -> None:
        self._schema = engine.address.schema
        self._connection = psycopg.connect(engine.address.conninfo, autocommit=True)

    def process(self, *functions: str) -> int | None:
        """The server's process that runs one of these functions of the store, if any."""
        names = [f'%"{self._schema}".{function}(%' for function in functions]
        query = "SELECT pid FROM pg_stat_activity WHERE query LIKE ANY (%s) AND state = 'active'"
        row = self._connection.execute(query, (names,)).fetchone()
        return None if row is None else int(row[0])

    def __call__(self, pid: int) -> bool:
        query = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
        row = self._connection.execute(query, (pid,)).fetchone()
        assert row is not None
        return bool(row[0])

    def settle(self, doing: Future[Any], pid: Callable[[], int | None]) -> bool:
        """Wait until it is done or waits for a lock; True if it is done."""
        deadline = time.monotonic() + TIMEOUT_S
        while not doing.done():
            number = pid()
            if number is not None and self(number):
                return doing.done()
            assert time.monotonic() < deadline
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        self._connection.close()


class OpenTransaction:
    """A connection in the middle of a transaction."""

    def __init__(self, engine: PostgresEngine, blocked: Blocked) -> None:
        self.engine = engine
        self._blocked = blocked
        self._connection = Client.connect(
            engine.address.conninfo, context=engine.connections._options()["context"]
        )
        self.doing: Future[Any] | None = None

    def write(self, write: Write) -> bool:
        """Run a write without committing it; False if it waits for a lock."""
        engine = self.engine
        made = request.prepare(write, engine.store_number, engine._compressor)
        self._connection.number += 1
        parameters = made.encoded(
            self._connection.client, self._connection.number, engine.clock and engine.clock(),
            lasting=True,
        )  # fmt: skip
        connection = self._connection
        # What psycopg would have done: a call alone begins no transaction.
        if connection.info.transaction_status == TransactionStatus.IDLE:
            connection.execute("BEGIN")
        self.doing = start(
            lambda: request.read_answer(connection.call(engine.write_call, parameters))
        )
        return self.settle()

    def execute(self, query: bytes, arguments: tuple[Any, ...]) -> bool:
        """Run a statement; False if it waits for a lock."""
        connection = self._connection

        def run() -> tuple[Any, ...]:
            row = connection.execute(query, arguments, binary=True).fetchone()
            assert row is not None
            return tuple(row)

        self.doing = start(run)
        return self.settle()

    def settle(self) -> bool:
        """Is the statement through, now that others have gone on?"""
        assert self.doing is not None
        return self._blocked.settle(self.doing, lambda: self._connection.info.backend_pid)

    def result(self) -> Any:
        """What the statement gave, once it is through."""
        assert self.doing is not None
        return self.doing.result(TIMEOUT_S)

    def commit(self) -> None:
        self.result()
        self._connection.commit()

    @property
    def pid(self) -> int:
        """The server's process behind it."""
        return self._connection.info.backend_pid

    def reset(self) -> None:
        """Forget whatever was done and not committed."""
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()


@contextmanager
def opened(engine: PostgresEngine) -> Iterator[Callable[[], OpenTransaction]]:
    """A way to begin transactions, all of them closed afterwards."""
    blocked = Blocked(engine)
    made: list[OpenTransaction] = []

    def make() -> OpenTransaction:
        made.append(OpenTransaction(engine, blocked))
        return made[-1]

    yield make
    for transaction in made:
        transaction.close()
    blocked.close()


def replace_function(engine: PostgresEngine, text: str, *changes: tuple[str, str]) -> None:
    """Give a store a function that differs from ours, to see what that part of it is good for."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    text = text.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
    with psycopg.connect(engine.address.conninfo, autocommit=True) as connection:
        connection.execute(encoded(text, engine.address.schema, engine.store_number))


def without_touches() -> tuple[str, str]:
    """The change that takes the touching out of a write."""
    from casstore.engine.postgres.tables import WRITE_SQL

    begin, end = WRITE_SQL.index("-- {{touch"), WRITE_SQL.index("-- touch}}")
    return WRITE_SQL[begin:end], ""
