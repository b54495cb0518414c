"""morrow's ``AgentSession`` and ``UserStore`` on a store: the same calls, stronger guarantees.

    from casstore.compat.agent_state import AgentSession, UserStore

Both store their data in the store at ``DB_PATH``; they may share one, because user data has its own
tables. Differences to the originals: an empty list of keys saves nothing, the newest checkpoint
is the one created last, restoring an unknown session raises an error, a value that would change in
storage is refused, and any thread may call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from casstore import store as stores
from casstore.errors import InvalidInputError, InvalidValueError
from casstore.records.json_values import restored, storable
from casstore.records.lifecycles.checkpoints import NewCheckpoint, put_checkpoints
from casstore.records.lifecycles.key_files import KeyStore
from casstore.records.lifecycles.lifecycles import Lifecycles
from casstore.store import Store

_DEFAULT: Final = Path(".agent_state.casstore")
_MISSING: Final = object()


class NotStorableError(InvalidValueError, TypeError):
    """A value cannot be stored exactly: it is not JSON, or would change."""


class _StoreOwner:
    """The common base: a store, opened here unless one is passed."""

    DB_PATH: Path = _DEFAULT

    def __init__(self, store: Store | None, keys: KeyStore | None = None) -> None:
        self._owned = store is None
        self._store = _opened(self.DB_PATH) if store is None else store
        try:
            self._life = Lifecycles(self._store, keys=keys)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._owned:
            self._store.close()


def _opened(path: Path) -> Store:
    if os.path.isfile(path):
        raise InvalidInputError(
            f"{path} is a file, but DB_PATH must be a store: choose another path for the store, "
            "and import the old database with import_morrow"
        )
    return stores.open(path)


class AgentSession(_StoreOwner):
    """Working state of one session, in memory, and checkpoints of chosen keys of it, stored.

    >>> work = AgentSession("s1", user_id="anna", store=store)
    >>> work.set_working("subtask", "report")
    >>> checkpoint = work.checkpoint(label="done", include_keys=["subtask"])
    >>> work.close()
    >>> AgentSession.restore("s1", store=store).get_checkpoint("done")
    {'subtask': 'report'}
    """

    def __init__(
        self, session_id: str, user_id: str | None = None, *, store: Store | None = None
    ) -> None:
        super().__init__(store)
        self.session_id = session_id
        self.user_id = user_id
        try:
            self._session = self._life.open_session(session_id, user=user_id)
        except BaseException:
            self._release()
            raise

    @property
    def _working(self) -> dict[str, Any]:
        """A copy of the working state; callers of the original access this attribute."""
        return self._session.working.chosen(None)

    def set_working(self, key: str, value: Any) -> None:
        """Set a value until the session is closed."""
        self._session.working.set(key, value)

    def get_working(self, key: str, default: Any = None) -> Any:
        """A value of the working state, or the default."""
        return self._session.working.get(key, default)

    def clear_working(self) -> None:
        """Delete the working state."""
        self._session.working.clear()

    def checkpoint(self, label: str, include_keys: Iterable[str] | None = None) -> str:
        """Save these keys, if they exist, as a checkpoint; None: all keys. Returns its id."""
        payload = _stored(self._session.working.chosen(include_keys))
        entry = NewCheckpoint(self.session_id, label, payload)
        return put_checkpoints(self._life.tables, self._life.subjects, [entry])[0].id

    def get_checkpoint(self, label: str) -> dict[str, Any] | None:
        """The content of the newest checkpoint with this label, or None."""
        found = self._session.find_checkpoint(label)
        return None if found is None else dict(restored(found.payload))

    def list_checkpoints(self) -> list[dict[str, Any]]:
        """Id, label and time of all checkpoints, in the order of creation."""
        return [
            {"id": info.id, "label": info.label, "created_at": info.created_at_ms / 1000}
            for info in self._session.checkpoints()
        ]

    @classmethod
    def restore(cls, session_id: str, *, store: Store | None = None) -> AgentSession:
        """A session with empty working state and all its checkpoints.

        SessionNotFoundError if it does not exist.
        """
        opened = _opened(cls.DB_PATH) if store is None else store
        try:
            Lifecycles(opened).restore(session_id)
            return cls(session_id, store=store)
        finally:
            if store is None:
                opened.close()

    def close(self) -> None:
        """Delete the working state; checkpoints stay. Closes the store, unless it was passed."""
        self._session.close()
        self._release()


class UserStore(_StoreOwner):
    """Data of users, separate from checkpoints; encrypted if keys are given.

    >>> users = UserStore(store=store)
    >>> users.set("anna", "email", "anna@example.org")
    >>> users.get("anna", "email"), users.delete_user("anna")
    ('anna@example.org', 1)
    """

    def __init__(self, *, store: Store | None = None, keys: KeyStore | None = None) -> None:
        super().__init__(store, keys)

    def set(self, user_id: str, key: str, value: Any) -> None:
        """Set a value."""
        self._life.users.put(user_id, key, _stored(value))

    def get(self, user_id: str, key: str, default: Any = None) -> Any:
        """A value, or the default."""
        found = self._life.users.get(user_id, key, _MISSING)
        return default if found is _MISSING else restored(found)

    def delete_user(self, user_id: str) -> int:
        """Delete all data of a user, and nothing else; returns how many values there were."""
        return self._life.users.erase(user_id).deleted

    def close(self) -> None:
        """Close the store, unless it was passed."""
        self._release()


def _stored(value: Any) -> Any:
    """The stored form of a value; NotStorableError if it would change."""
    try:
        kept = storable(value)
    except InvalidValueError as exc:
        raise NotStorableError(exc.reason, exc.path) from exc
    if kept is not value and restored(kept) != value:
        raise NotStorableError("JSON would change this value; convert it first")
    return kept
