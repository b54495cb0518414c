"""Watches on a server: one listening connection for all watches of an engine.

A listener registers itself in the table ``watchers``, and while it is not empty, writers send a
notification after each commit. The notification has its own transaction, because the server
serialises the commits of transactions that notify. If a writer dies between the two, its commit has
no notification, so the listener also polls every few seconds. Where notifications do not arrive
(behind a pooler in transaction mode, on a standby, for a role that can only read), the listener
polls several times a second.

It polls the table ``clients``, which each write changes in its own transaction. It does not poll
the sequence ``writes``: that advances before the write commits, and on a standby in jumps, so a
waiting caller could be woken too early, find nothing, and miss the write.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import psycopg
from psycopg import sql
from psycopg.types.numeric import Int8

from casstore.engine.postgres.connections import Client, translated
from casstore.engine.watches import PipeWatch
from casstore.errors import CasstoreError, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from casstore.engine.postgres.engine import PostgresEngine

# If a listener is killed, its registration expires after this time.
_REGISTERED_MS: Final = 120_000
_RENEW_S: Final = _REGISTERED_MS / 1000 / 4
# The interval of polling, with notifications and without them.
_LOOK_S: Final = 5.0
_LOOK_OFTEN_S: Final = 0.2
# If the trial notification takes longer, notifications count as not arriving.
_TRIAL_S: Final = 2.0
# The pause before the listener reconnects.
_RECONNECT_S: Final = 1.0
# The pause between two queries for the running writers.
_REST_S: Final = 0.01
# How long, in addition to the store's patience, the first watch waits for the listener.
_READY_S: Final = 60.0

_WRITERS: Final = """
    SELECT virtualtransaction FROM pg_locks
        WHERE locktype = 'advisory' AND granted AND objsubid = 1
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND classid::bigint << 32 | objid::bigint = %b
"""


class Watching:
    """The watches of one engine, and the thread that wakes them."""

    def __init__(self, engine: PostgresEngine) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Weak references: a watch belongs to the caller that waits on it.
        self._watches: WeakSet[PipeWatch] = WeakSet()
        self._listener: _Listener | None = None
        self.channel = f"casstore_{engine.store_number:016x}"
        self._notify = engine.statement(
            "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%b, '')"
        )

    def watch(self) -> PipeWatch:
        """A watch that wakes after every later write."""
        watch = PipeWatch(self._engine.connections.check)
        with self._lock:
            self._watches.add(watch)
            if self._listener is None:
                self._listener = _Listener(self._engine, self)
            listener = self._listener
        try:
            listener.wait_until_ready()
        except BaseException:
            with self._lock:
                if self._listener is listener and listener.has_ended:
                    self._listener = None
            raise
        return watch

    def notify(self) -> None:
        """Notify all listeners of a write that has committed."""
        with suppress(CasstoreError):
            # The write has committed, so its caller must not get an error. Listeners notice the
            # write when they poll.
            self._engine.connections.fetch(self._notify, (self.channel,))

    def wake(self) -> None:
        """Wake all watches."""
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.wake()

    @property
    def is_used(self) -> bool:
        """True if there is a watch."""
        with self._lock:
            return bool(self._watches)

    def end_if_unused(self, listener: _Listener) -> bool:
        """Drop the listener if no watch is left; True if it should end."""
        with self._lock:
            if self._watches or self._listener is not listener:
                return False
            self._listener = None
            return True

    def close(self) -> None:
        """Stop listening; all watches wake and stay readable."""
        if os.getpid() != self._pid:
            # The pipes are shared with the parent process: writing to them would wake its watches.
            return
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self.wake()


class _Listener:
    """A thread that waits on its own connection for writes, and then wakes all watches."""

    def __init__(self, engine: PostgresEngine, watching: Watching) -> None:
        self._engine = engine
        self._watching = watching
        self._name = os.urandom(16)
        self._ready = threading.Event()
        self._problem: CasstoreError | None = None
        self._ending = threading.Lock()
        self._notified = False
        self._seen: tuple[int, ...] = ()
        self.has_ended = False
        self._register = engine.statement(
            "INSERT INTO {s}.watchers VALUES (%b, %b + coalesce(%b, {s}.now_ms())) "
            "ON CONFLICT (watcher) DO UPDATE SET until_ms = excluded.until_ms"
        )
        self._unregister = engine.statement("DELETE FROM {s}.watchers WHERE watcher = %b")
        self._forget = engine.statement(
            "DELETE FROM {s}.watchers WHERE until_ms < coalesce(%b, {s}.now_ms())"
        )
        # The count as well as the sum: collections delete rows of ``clients``, and the sum of the
        # numbers alone could stay the same.
        self._look = engine.statement(
            "SELECT count(*), coalesce(sum(number), 0)::bigint, coalesce(max(now_ms), 0) "
            "FROM {s}.clients"
        )
        self._thread = threading.Thread(target=self._run, name="casstore-listener", daemon=True)
        try:
            self._stopping, self._stop = os.pipe()
        except OSError as exc:
            raise StorageError(f"cannot open a pipe for the listener: {exc.strerror}") from exc
        try:
            self._thread.start()
        except RuntimeError as exc:
            os.close(self._stopping)
            os.close(self._stop)
            raise StorageError(f"cannot start the listener's thread: {exc}") from exc

    def wait_until_ready(self) -> None:
        """Return when no later write can be missed."""
        if not self._ready.wait(self._engine.address.patience_s + _READY_S):
            raise StorageUnavailableError(
                f"{self._engine.address.place} does not answer; retry when the server is available"
            )
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        with self._ending:
            if not self.has_ended:
                os.write(self._stop, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        deadline = monotonic() + self._engine.address.patience_s
        try:
            while not self._stopped(0):
                is_first = not self._ready.is_set()
                try:
                    # After the first success the listener reconnects until the engine is closed.
                    with self._engine.connections.alone(patient=is_first) as connection:
                        self._listen(connection)
                    return
                except CasstoreError as exc:
                    if self._ready.is_set():
                        # Waiting callers may have missed a write while the connection was down.
                        self._watching.wake()
                    elif not isinstance(exc, StorageUnavailableError) or monotonic() >= deadline:
                        # The caller that opened the first watch gets the error.
                        self._problem = exc
                        return
                    if self._stopped(_RECONNECT_S):
                        return
        finally:
            with self._ending:
                self.has_ended = True
                os.close(self._stopping)
                os.close(self._stop)
            self._ready.set()

    def _stopped(self, timeout_s: float) -> bool:
        return bool(_readable(timeout_s, self._stopping))

    def _listen(self, connection: Client) -> None:
        self._notified = False
        connection.add_notify_handler(self._take_note)
        arrives = self._subscribe(connection)
        self._notified = False
        self._seen = self._written(connection)
        if self._ready.is_set():
            # This is a reconnection: notifications in between were lost.
            self._watching.wake()
        self._ready.set()
        pause_s = _LOOK_S if arrives else _LOOK_OFTEN_S
        # Renew by the clock, and not when a wait times out: on a busy store no wait times out.
        announced_s = used_s = monotonic()
        while True:
            readable = _readable(pause_s, connection.fileno(), self._stopping)
            if self._stopping in readable:
                break
            if arrives and monotonic() - announced_s >= _RENEW_S:
                self._announce(connection)
                announced_s = monotonic()
            # A query makes psycopg read the notifications that have arrived.
            written = self._written(connection)
            if self._notified or written != self._seen:
                self._notified = False
                self._seen = written
                self._watching.wake()
            if self._watching.is_used:
                used_s = monotonic()
            elif monotonic() - used_s >= pause_s and self._watching.end_if_unused(self):
                break
        self._leave(connection, arrives=arrives)

    def _take_note(self, notification: psycopg.Notify) -> None:
        self._notified = True

    def _subscribe(self, connection: Client) -> bool:
        """Listen and register; False if notifications do not arrive on this connection."""
        channel = self._watching.channel
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            self._announce(connection)
            # Try whether a notification, sent from another connection while this one is idle,
            # arrives. It does not if a pooler in transaction mode has assigned this connection's
            # server process to another client.
            self._watching.notify()
            if not _readable(_TRIAL_S, connection.fileno()):
                self._leave(connection, arrives=True)
                return False
            # Writers that began before the registration may not notify. Wait until they have ended:
            # then ``_written`` sees their commits. Poll for that, because waiting for their lock
            # would block all new writers.
            under_way = self._writers(connection)
            while under_way and not self._stopped(_REST_S):
                under_way &= self._writers(connection)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction):
            return False
        return self._notified

    def _writers(self, connection: Client) -> set[str]:
        """The transactions that hold this store's advisory lock: the running writes."""
        found = connection.execute(_WRITERS, (Int8(self._engine.store_number),)).fetchall()
        return {name for (name,) in found}

    def _announce(self, connection: Client) -> None:
        """Register this listener, or renew its registration; delete expired ones."""
        given_ms = self._engine.given_ms()
        connection.execute(self._register, (self._name, Int8(_REGISTERED_MS), given_ms))
        connection.execute(self._forget, (given_ms,))

    def _leave(self, connection: Client, *, arrives: bool) -> None:
        """Delete this listener's registration, if notifications arrive (else it has none)."""
        if arrives:
            with suppress(CasstoreError), translated(self._engine.address):
                # If the registration cannot be deleted, it expires.
                connection.execute(self._unregister, (self._name,))

    def _written(self, connection: Client) -> tuple[int, ...]:
        """Numbers that change with every write."""
        row: tuple[int, ...] | None = connection.execute(self._look).fetchone()
        assert row is not None
        return row


def _readable(timeout_s: float, *descriptors: int) -> list[int]:
    """Those descriptors that have data to read, or an end of file."""
    # Not select: it is limited to descriptors below 1024, and a busy process has more.
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]
