"""The pool of connections to the server, and the translation of the server's errors.

A call whose connection breaks is retried over another connection, for as long as the store's
``patience``. That is harmless for reads; a write has a number that keeps it from running twice
(``request``).
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.generators import execute
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from casstore.engine.postgres.absence import may_pass
from casstore.engine.postgres.adapting import adapters_with_arrays
from casstore.engine.postgres.address import Address
from casstore.errors import (
    BusyError,
    CasstoreError,
    ClosedError,
    ForkedError,
    InvalidInputError,
    ReadOnlyError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

Answer = TypeVar("Answer")
Rows = list[tuple[Any, ...]]

_CLIENT_BYTES: Final = 16
_PREPARE_AFTER: Final = 5
# How many times at most a call is retried because another write collided with it: that one
# succeeded.
_MAX_COLLISIONS: Final = 256
# The longest pause before such a retry.
_LONGEST_PAUSE_S: Final = 0.05
# How long one request waits for a free connection of the pool.
_ASK_S: Final = 2.0
# How long the pool retries to connect, with growing pauses; the next request after that makes it
# retry again.
_MAKE_S: Final = 5.0

# Options of libpq. A machine that loses power does not close its connections. By default TCP
# retries for 15 minutes, and probes an idle connection after two hours; a call must notice a dead
# connection within its patience.
_NOTICING: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
# How long to wait for one of several hosts before trying the next.
_CONNECT_S: Final = 5

# The pauses between attempts to open a store on an unavailable server.
_FIRST_REST_S: Final = 0.05
_LONGEST_REST_S: Final = 0.5

# How long a connection may be used for further calls without returning it to the pool.
_LENT_S: Final = 60.0

_ADAPTERS: Final = adapters_with_arrays()

# SQLSTATE codes of a connection that was lost, or refused for now: shutdown, crash, startup, idle
# timeout, too many connections.
_AWAY: Final = frozenset(("57P01", "57P02", "57P03", "57P05", "53300"))
# Serialization failure, deadlock, and a unique violation: another write stored an object after this
# one looked for it.
_COLLIDED: Final = frozenset(("40001", "40P01", "23505"))
_FORBIDDEN: Final = frozenset(("42501", "25006"))
_FULL: Final = frozenset(("53100", "54000"))
_LOCKED: Final = frozenset(("55P03",))
# A time limit of the server, or pg_cancel_backend.
_CANCELLED: Final = frozenset(("57014",))
_NOT_THERE: Final = frozenset(("42P01", "42883", "3F000"))


class Call(NamedTuple):
    """A statement whose parameters are encoded in the server's binary format."""

    name: bytes
    query: bytes
    types: Sequence[int]
    formats: Sequence[Format]


class Client(psycopg.Connection[Any]):
    """A connection with a random client name, under which the writes made over it are numbered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client = os.urandom(_CLIENT_BYTES)
        self.number = 0
        #: The pool that it belongs to.
        self.lender: ConnectionPool[Client] | None = None
        self._known_calls: set[bytes] = set()
        # A pooler may assign a server process on which another client has listened. Its
        # notifications arrive here, and without a handler psycopg would collect them without limit.
        self.add_notify_handler(_let_pass)

    def call(self, call: Call, parameters: Sequence[bytes | None]) -> PGresult:
        """Run a call directly by libpq: psycopg would look up a type for each parameter.

        No other thread may use the connection during the call.
        """
        pgconn = self.pgconn
        if self.prepare_threshold is None:
            pgconn.send_query_params(
                call.query, parameters, call.types, call.formats, Format.BINARY
            )
            return self._answer(ExecStatus.TUPLES_OK)
        if call.name not in self._known_calls:
            pgconn.send_prepare(call.name, call.query, call.types)
            try:
                self._answer(ExecStatus.COMMAND_OK)
            except psycopg.Error:
                raise
            except BaseException:
                # Interrupted: it is unknown whether the server has prepared the statement.
                self.close()
                raise
            self._known_calls.add(call.name)
        pgconn.send_query_prepared(call.name, parameters, call.formats, Format.BINARY)
        return self._answer(ExecStatus.TUPLES_OK)

    def _answer(self, expected: ExecStatus) -> PGresult:
        # This wait is interruptible by Ctrl-C, and then cancels the statement on the server.
        result: PGresult = self.wait(execute(self.pgconn))[-1]
        if result.status != expected:
            raise psycopg.errors.error_from_result(result, self.info.encoding)
        return result


def _let_pass(notification: psycopg.Notify) -> None:
    """Ignore a notification; the connection of the listener has a handler of its own."""


class Connections:
    """The pool of one engine."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pid = os.getpid()
        self._closed = False
        self._pool: ConnectionPool[Client] | None = None
        # At most one connection that stays borrowed from the pool, for the next call of any thread:
        # asking the pool takes as long as encoding the whole call.
        self._at_hand: list[Client] = []
        # When a connection was last borrowed from the pool.
        self._lent_s = 0.0
        # The threads that wait for the pool. They have priority over ``_at_hand``.
        self._asking: set[int] = set()
        # The connection that each thread uses. Ctrl-C may come after any call, and a connection
        # that only a local variable refers to would then be lost to the pool. So a connection moves
        # between the pool, ``_at_hand`` and ``_in_use`` without a call in between.
        self._in_use: dict[int, Client] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Create the pool, which connects in the background."""
        self._pool = self._made_pool()

    def _made_pool(self) -> ConnectionPool[Client]:
        return ConnectionPool(
            self.address.conninfo,
            connection_class=Client,
            kwargs=self._options(),
            min_size=1,
            max_size=self.address.pool,
            timeout=_ASK_S,
            reconnect_timeout=_MAKE_S,
            open=True,
            name="casstore",
        )

    def check(self) -> None:
        """Raise ClosedError or ForkedError if the engine was closed or the process forked."""
        if self._closed:
            raise ClosedError("the engine was closed")
        if os.getpid() != self._pid:
            raise ForkedError("this store was opened before a fork; the child must open it again")

    def close(self) -> None:
        """Close all connections."""
        if self._closed:
            return
        self._closed = True
        # A forked child has copies of the parent's connections, and must not use them.
        if self._pool is not None and os.getpid() == self._pid:
            with self._lock:
                pool = self._pool
            pool.close()
            while self._at_hand:
                self._give_back(self._at_hand.pop())

    @contextmanager
    def alone(self, *, patient: bool = True) -> Iterator[Client]:
        """A connection outside the pool, for long operations; not ``patient``: connect once."""
        connection = self._patiently_connected(self.address.patience_s if patient else 0.0)
        try:
            with translated(self.address):
                yield connection
        finally:
            connection.close()

    def run_alone(self, work: Callable[[Client], Answer]) -> Answer:
        """Call ``work`` with a connection outside the pool; repeat it if the connection is lost."""
        deadline = time.monotonic() + self.address.patience_s
        while True:
            connection = self._patiently_connected(deadline - time.monotonic())
            try:
                return work(connection)
            except psycopg.Error as exc:
                if not is_away(exc) or time.monotonic() >= deadline:
                    raise in_our_words(exc, self.address) from exc
            finally:
                connection.close()
            _rest(_FIRST_REST_S, deadline)

    def _patiently_connected(self, patience_s: float) -> Client:
        """A new connection; retries while the server is unavailable.

        Does not retry if the server rejects the connection for good.
        """
        deadline = time.monotonic() + patience_s
        rest_s = _FIRST_REST_S
        was_refused = False
        while True:
            self.check()
            try:
                return self._connected(deadline)
            except psycopg.Error as exc:
                if not is_away(exc) or time.monotonic() >= deadline:
                    raise in_our_words(exc, self.address) from exc
                if not may_pass(exc, self.address.conninfo):
                    # Try once more: the server may have come back between the failed attempt and
                    # the check of ``may_pass``.
                    if was_refused:
                        raise in_our_words(exc, self.address) from exc
                    was_refused = True
                    continue
                was_refused = False
            _rest(rest_s, deadline)
            rest_s = min(2 * rest_s, _LONGEST_REST_S)

    def _connected(self, deadline: float) -> Client:
        try:
            return Client.connect(self.address.conninfo, **self._patient_options(deadline))
        except (psycopg.ProgrammingError, UnicodeError) as exc:
            reason = self.address.without_secrets(str(exc).strip())
            # Without ``from exc``: its traceback would show the password that the message hides.
            raise InvalidInputError(f"{self.address.place}: {reason}") from None

    def _patient_options(self, deadline: float) -> dict[str, Any]:
        """Options with a timeout for hosts that do not answer, unless the URL sets one."""
        options = self._options()
        given = conninfo_to_dict(self.address.conninfo)
        if not {"service", "connect_timeout"} & given.keys() and (
            "PGCONNECT_TIMEOUT" not in os.environ
        ):
            left_s = math.ceil(deadline - time.monotonic())
            options.setdefault("connect_timeout", max(_CONNECT_S, left_s))
        return options

    def _options(self) -> dict[str, Any]:
        given = conninfo_to_dict(self.address.conninfo)
        noticing = dict(_NOTICING)
        if "," in str(given.get("host", "")) and "PGCONNECT_TIMEOUT" not in os.environ:
            noticing["connect_timeout"] = _CONNECT_S
        if "service" in given:
            # A service file may set the timeout; an option here would override it.
            noticing.clear()
        return {
            **{name: value for name, value in noticing.items() if name not in given},
            "autocommit": True,
            # Override the encoding of the database and role: with SQL_ASCII, text arrives as bytes.
            "client_encoding": "utf8",
            "context": _ADAPTERS_CONTEXT,
            "prepare_threshold": _PREPARE_AFTER if self.address.prepare else None,
        }

    # --- calls ------------------------------------------------------------------------------

    def fetch(self, query: bytes, parameters: Sequence[Any] = ()) -> Rows:
        """Run a query and return its rows; repeat it if the connection is lost."""

        def ask(connection: Client) -> Rows:
            return connection.execute(query, parameters, binary=True).fetchall()

        return self.run(ask)

    def run(self, work: Callable[[Client], Answer]) -> Answer:
        """Call ``work`` with a connection; retry with another one if the connection is lost."""
        deadline = time.monotonic() + self.address.patience_s
        collisions = 0
        while True:
            self.check()
            try:
                connection = self._take()
                try:
                    answer = work(connection)
                except BaseException as exc:
                    if isinstance(exc, psycopg.Error) and is_away(exc):
                        # The retry repeats the number of a write of this connection, so no other
                        # thread may make a write with a higher number over it.
                        connection.close()
                    self._give_back(connection)
                    raise
                self._keep(connection)
                return answer
            except PoolClosed as exc:
                # If the engine is open, the pool was replaced: retry with the new one.
                if self._closed:
                    raise ClosedError("the engine was closed") from exc
            except PoolTimeout as exc:
                if time.monotonic() >= deadline:
                    raise StorageUnavailableError(
                        f"cannot get a connection to {self.address.place}; check that the server "
                        "is running and has free connections"
                    ) from exc
            except psycopg.Error as exc:
                if self._closed:
                    raise ClosedError("the engine was closed") from exc
                if has_collided(exc) and collisions < _MAX_COLLISIONS:
                    collisions += 1
                    # A random pause, so that conflicting writes do not meet again.
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * collisions)))
                    continue
                if not is_away(exc):
                    raise in_our_words(exc, self.address) from exc
                if time.monotonic() >= deadline:
                    raise in_our_words(exc, self.address) from exc
                # A random pause, so that not all clients reconnect at the same moment.
                time.sleep(random.uniform(0, _LONGEST_PAUSE_S))

    def _take(self) -> Client:
        me = threading.get_ident()
        lost = self._in_use.get(me)
        if lost is not None:
            # Ctrl-C interrupted the last call while it borrowed or returned the connection, so its
            # owner is unknown. Replace the pool, which drops the connection from the count.
            assert lost.lender is not None
            self._give_up(lost.lender)
            self._in_use.pop(me, None)
        with self._lock:
            if self._at_hand:
                self._in_use[me] = self._at_hand[-1]
                del self._at_hand[-1]
                return self._in_use[me]
            self._asking.add(me)
        try:
            assert self._pool is not None
            self._lent_s = time.monotonic()
            return self._lent_by(self._pool, me)
        finally:
            self._asking.discard(me)

    def _lent_by(self, pool: ConnectionPool[Client], me: int) -> Client:
        try:
            self._in_use[me] = pool.getconn()
        except (PoolTimeout, PoolClosed):
            raise
        except BaseException:
            # Ctrl-C: this thread's request stays in the pool's queue, and the next connection would
            # be assigned to it and lost. The pool cannot cancel a request.
            self._give_up(pool)
            raise
        connection = self._in_use[me]
        connection.lender = pool
        return connection

    def _give_up(self, pool: ConnectionPool[Client]) -> None:
        """Replace the pool. The old one closes its borrowed connections when they are returned."""
        with self._lock:
            if self._closed or self._pool is not pool:
                return
            self._pool = self._made_pool()
        # In a thread: closing waits for the pool's threads, and one of them may be connecting.
        threading.Thread(target=pool.close, name="casstore-old-pool", daemon=True).start()

    def _keep(self, connection: Client) -> None:
        """Hold a connection back for the next call, unless another thread waits for one."""
        me, now_s = threading.get_ident(), time.monotonic()
        with self._lock:
            # Only for a limited time, so that the pool gets to check the connection.
            is_fresh = connection.lender is self._pool and now_s - self._lent_s < _LENT_S
            if is_fresh and not (self._at_hand or self._asking or self._closed):
                self._at_hand = [connection]
                if me in self._in_use:
                    del self._in_use[me]
                return
        self._give_back(connection)

    def _give_back(self, connection: Client) -> None:
        assert connection.lender is not None
        connection.lender.putconn(connection)
        me = threading.get_ident()
        if self._in_use.get(me) is connection:
            del self._in_use[me]


def _rest(longest_s: float, deadline: float) -> None:
    """Sleep for a random time, at most ``longest_s`` and not beyond ``deadline``."""
    pause_s = random.uniform(longest_s / 2, longest_s)
    time.sleep(min(pause_s, max(0, deadline - time.monotonic())))


def is_away(exc: psycopg.Error) -> bool:
    """True if the connection was lost, or the server cannot be reached."""
    state = exc.sqlstate
    if state is None:
        return isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith("08") or state in _AWAY


def has_collided(exc: psycopg.Error) -> bool:
    """True if the server rolled the statement back because of a concurrent one."""
    return exc.sqlstate in _COLLIDED


def in_our_words(exc: psycopg.Error, address: Address) -> CasstoreError:
    """The casstore error for an error of the server, by its remedy."""
    state = exc.sqlstate or ""
    said = f"{address.place}: {str(exc).strip()}"
    if is_away(exc) and exc.sqlstate is None:
        return StorageUnavailableError(
            f"{said}; retry when the server is available, if host, port and user are right"
        )
    if is_away(exc):
        return StorageUnavailableError(f"{said}; retry when the server is available")
    if state in _FORBIDDEN:
        return ReadOnlyError(f"{said}; use a role that may write, and the primary server")
    if has_collided(exc) or state in _LOCKED:
        return BusyError(f"{said}; other transactions hold the locks; retry")
    if state in _CANCELLED:
        return BusyError(f"{said}; retry; if it is a time limit, allow more")
    if state in _FULL:
        return StorageFullError(said)
    if state in _NOT_THERE:
        return StorageError(f"{said}; the store was dropped, or belongs to another release")
    return StorageError(said)


@contextmanager
def translated(address: Address) -> Iterator[None]:
    """Raise the server's errors as casstore errors."""
    try:
        yield
    except psycopg.Error as exc:
        raise in_our_words(exc, address) from exc


class _Context:
    """The context that makes psycopg's connections use ``_ADAPTERS``."""

    adapters = _ADAPTERS
    connection = None


_ADAPTERS_CONTEXT: Final = _Context()
