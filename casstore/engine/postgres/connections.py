"""Connections to the server: a pool of them, and what goes wrong with them in our own words.

A call that finds its connection broken tries another one, as long as the store's patience lasts.
That is harmless for whatever only reads; writes carry a number that keeps them from happening
twice (``request``).
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
# How often a write meets others before it gives up; each time somebody else got through.
_MAX_COLLISIONS: Final = 256
_LONGEST_PAUSE_S: Final = 0.05
# How long the pool is asked for a connection at a time, and how long it goes on trying to make
# one: it waits ever longer between attempts, and whoever asks again has it begin anew.
_ASK_S: Final = 2.0
_MAKE_S: Final = 5.0

# A machine that is gone does not say so. Left to itself, TCP goes on for a quarter of an hour, and
# for two hours if it is silent; this has to be noticed while the patience of a call lasts.
_NOTICING: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
# How long one of several hosts is waited for before the next is tried.
_CONNECT_S: Final = 5

# The pauses of whoever opens a store on a server that is away.
_FIRST_REST_S: Final = 0.05
_LONGEST_REST_S: Final = 0.5

# How long a connection is kept away from the pool.
_LENT_S: Final = 60.0

_ADAPTERS: Final = adapters_with_arrays()

# Lost, or not to be had just now: shutdown, crash, still starting, too many connections.
_AWAY: Final = frozenset(("57P01", "57P02", "57P03", "57P05", "53300"))
# The third: an object that another has stored since it was looked for.
_COLLIDED: Final = frozenset(("40001", "40P01", "23505"))
_FORBIDDEN: Final = frozenset(("42501", "25006"))
_FULL: Final = frozenset(("53100", "54000"))
_LOCKED: Final = frozenset(("55P03",))
# A time limit of the server's, or somebody's pg_cancel_backend.
_CANCELLED: Final = frozenset(("57014",))
_NOT_THERE: Final = frozenset(("42P01", "42883", "3F000"))


class Call(NamedTuple):
    """A statement whose parameters come spelled as the server reads them, in binary."""

    name: bytes
    query: bytes
    types: Sequence[int]
    formats: Sequence[Format]


class Client(psycopg.Connection[Any]):
    """A connection that counts the writes made over it, under a name that no other has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client = os.urandom(_CLIENT_BYTES)
        self.number = 0
        #: Whom it goes back to.
        self.lender: ConnectionPool[Client] | None = None
        self._known_calls: set[bytes] = set()
        # A pooler may hand us a backend on which somebody listened; psycopg would keep all that
        # arrives for ever, unless somebody takes it.
        self.add_notify_handler(_let_pass)

    def call(self, call: Call, parameters: Sequence[bytes | None]) -> PGresult:
        """Make a call that is made often, past all that psycopg does to choose types.

        The connection is the caller's alone for as long as it takes.
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
                # Interrupted: nobody knows whether the name is taken now.
                self.close()
                raise
            self._known_calls.add(call.name)
        pgconn.send_query_prepared(call.name, parameters, call.formats, Format.BINARY)
        return self._answer(ExecStatus.TUPLES_OK)

    def _answer(self, expected: ExecStatus) -> PGresult:
        # Waits so that Ctrl-C gets through, and then has the server give up as well.
        result: PGresult = self.wait(execute(self.pgconn))[-1]
        if result.status != expected:
            raise psycopg.errors.error_from_result(result, self.info.encoding)
        return result


def _let_pass(notification: psycopg.Notify) -> None:
    """Do nothing: who listens has a handler beside this one."""


class Connections:
    """The pool of one engine."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pid = os.getpid()
        self._closed = False
        self._pool: ConnectionPool[Client] | None = None
        # A connection that was lent by the pool and is used again without asking it: that takes as
        # long as spelling the whole call. Who waits for the pool is counted, and served first.
        self._at_hand: list[Client] = []
        self._lent_s = 0.0
        self._asking: set[int] = set()
        # By thread. Ctrl-C may come between any two calls, and a connection that only a variable
        # knew of would be missing from the pool for ever; so it moves from one place to another
        # without a call in between.
        self._in_use: dict[int, Client] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the pool. Connections are made when they are needed, and kept."""
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
        """Raise if calls are refused: the engine was closed, or the process forked."""
        if self._closed:
            raise ClosedError("the engine was closed")
        if os.getpid() != self._pid:
            raise ForkedError("this store was opened before a fork; the child must open it again")

    def close(self) -> None:
        """Let go of all connections."""
        if self._closed:
            return
        self._closed = True
        # The child of a fork has the parent's connections, and must not touch them.
        if self._pool is not None and os.getpid() == self._pid:
            with self._lock:
                pool = self._pool
            pool.close()
            while self._at_hand:
                self._give_back(self._at_hand.pop())

    @contextmanager
    def alone(self, *, patient: bool = True) -> Iterator[Client]:
        """A connection beside the pool, for what takes long."""
        connection = self._patiently_connected(self.address.patience_s if patient else 0.0)
        try:
            with translated(self.address):
                yield connection
        finally:
            connection.close()

    def run_alone(self, work: Callable[[Client], Answer]) -> Answer:
        """Call ``work``, which may be done twice, with a connection that it has for itself."""
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
        """A connection; a server that is away is waited for as calls do it.

        One that answers and does not let us in would not do so later either.
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
                    # It may have come back between our question and the next one.
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
            told = self.address.without_secrets(str(exc).strip())
            # Not from exc: a traceback would tell what the message does not.
            raise InvalidInputError(f"{self.address.place}: {told}") from None

    def _patient_options(self, deadline: float) -> dict[str, Any]:
        """With an end to the wait for a machine that says nothing at all, unless one was set."""
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
            # Its file says whatever it says, and we would speak louder.
            noticing.clear()
        return {
            **{name: value for name, value in noticing.items() if name not in given},
            "autocommit": True,
            # Whatever the database and the role have: in one of them text comes as bytes.
            "client_encoding": "utf8",
            "context": _ADAPTERS_CONTEXT,
            "prepare_threshold": _PREPARE_AFTER if self.address.prepare else None,
        }

    # --- calls ------------------------------------------------------------------------------

    def fetch(self, query: bytes, parameters: Sequence[Any] = ()) -> Rows:
        """Ask something that may be asked again."""

        def ask(connection: Client) -> Rows:
            return connection.execute(query, parameters, binary=True).fetchall()

        return self.run(ask)

    def run(self, work: Callable[[Client], Answer]) -> Answer:
        """Call ``work`` with a connection; again with another if the first one was lost."""
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
                        # Nobody else may go on counting where a write is still to be asked about.
                        connection.close()
                    self._give_back(connection)
                    raise
                self._keep(connection)
                return answer
            except PoolClosed as exc:
                # Or it was given up for another one.
                if self._closed:
                    raise ClosedError("the engine was closed") from exc
            except PoolTimeout as exc:
                if time.monotonic() >= deadline:
                    raise StorageUnavailableError(
                        f"no connection to {self.address.place} was to be had; is the server "
                        "there, and has it connections to spare?"
                    ) from exc
            except psycopg.Error as exc:
                if self._closed:
                    raise ClosedError("the engine was closed") from exc
                if has_collided(exc) and collisions < _MAX_COLLISIONS:
                    collisions += 1
                    # Those who met would meet again, if all came back at the same moment.
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * collisions)))
                    continue
                if not is_away(exc):
                    raise in_our_words(exc, self.address) from exc
                if time.monotonic() >= deadline:
                    raise in_our_words(exc, self.address) from exc
                # A server that comes back is not asked by all of its clients at once.
                time.sleep(random.uniform(0, _LONGEST_PAUSE_S))

    def _take(self) -> Client:
        me = threading.get_ident()
        lost = self._in_use.get(me)
        if lost is not None:
            # Ctrl-C ended the last call on the way to the pool or back, and who has it now is not
            # to be told. With its pool it is out of the count.
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
            # Ctrl-C: our place in the queue stays there, and the next connection is given to it
            # and lost. The pool has no way to tell it otherwise.
            self._give_up(pool)
            raise
        connection = self._in_use[me]
        connection.lender = pool
        return connection

    def _give_up(self, pool: ConnectionPool[Client]) -> None:
        """Go on with another pool. What the old one has lent comes back to it, and is closed."""
        with self._lock:
            if self._closed or self._pool is not pool:
                return
            self._pool = self._made_pool()
        # It waits for its threads, one of which may be connecting just now.
        threading.Thread(target=pool.close, name="casstore-old-pool", daemon=True).start()

    def _keep(self, connection: Client) -> None:
        """Have a connection at hand for the next call, unless somebody waits for one."""
        me, now_s = threading.get_ident(), time.monotonic()
        with self._lock:
            # One is enough, and now and then the pool has a look at it: they grow old.
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
    """Wait a moment, another one than others do."""
    pause_s = random.uniform(longest_s / 2, longest_s)
    time.sleep(min(pause_s, max(0, deadline - time.monotonic())))


def is_away(exc: psycopg.Error) -> bool:
    """Was the connection lost, or the server not to be reached?"""
    state = exc.sqlstate
    if state is None:
        return isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith("08") or state in _AWAY


def has_collided(exc: psycopg.Error) -> bool:
    """Did the server refuse it because of what somebody else did at the same moment?"""
    return exc.sqlstate in _COLLIDED


def in_our_words(exc: psycopg.Error, address: Address) -> CasstoreError:
    """What a caller would do about an error of the server."""
    state = exc.sqlstate or ""
    said = f"{address.place}: {str(exc).strip()}"
    if is_away(exc) and exc.sqlstate is None:
        return StorageUnavailableError(
            f"{said}; try again when the server is back, if host, port and user are right"
        )
    if is_away(exc):
        return StorageUnavailableError(f"{said}; try again when the server is back")
    if state in _FORBIDDEN:
        return ReadOnlyError(f"{said}; use a role that may write, and the primary server")
    if has_collided(exc) or state in _LOCKED:
        return BusyError(f"{said}; others hold what this needs, try again")
    if state in _CANCELLED:
        return BusyError(f"{said}; try again, and if it is a time limit, allow more")
    if state in _FULL:
        return StorageFullError(said)
    if state in _NOT_THERE:
        return StorageError(f"{said}; the store was dropped, or is of another release")
    return StorageError(said)


@contextmanager
def translated(address: Address) -> Iterator[None]:
    """Turn the server's errors into ours."""
    try:
        yield
    except psycopg.Error as exc:
        raise in_our_words(exc, address) from exc


class _Context:
    """Hands psycopg our adapters."""

    adapters = _ADAPTERS
    connection = None


_ADAPTERS_CONTEXT: Final = _Context()
