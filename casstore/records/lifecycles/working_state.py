"""Working state: an agent's values in memory, discarded when the session closes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from casstore.engine.forks import Lock
from casstore.session.arguments import list_of


class WorkingState:
    """Values by name, safe for threads. Never written to disk.

    >>> working = WorkingState()
    >>> working.set("plan", ["read", "write"])
    >>> working.get("plan")
    ['read', 'write']
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Set a value.

        >>> working = WorkingState()
        >>> working.set("scratch", object())  # anything: it is never written
        """
        with self._lock:
            self._values[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or the default.

        >>> WorkingState().get("plan", "none yet")
        'none yet'
        """
        with self._lock:
            return self._values.get(name, default)

    def names(self) -> list[str]:
        """The names, in the order they were set.

        >>> working = WorkingState()
        >>> for name in ("plan", "draft"):
        ...     working.set(name, "text")
        >>> working.names()
        ['plan', 'draft']
        """
        with self._lock:
            return list(self._values)

    def clear(self) -> None:
        """Remove all values.

        >>> working = WorkingState()
        >>> working.set("plan", ["read", "write"])
        >>> working.clear()
        >>> working.names()
        []
        """
        with self._lock:
            self._values.clear()

    def chosen(self, names: Iterable[str] | None) -> dict[str, Any]:
        """The values of the given names, without names that do not exist; None: all values.

        >>> working = WorkingState()
        >>> working.set("plan", ["read", "write"])
        >>> working.chosen(["plan", "draft"]), working.chosen([])
        ({'plan': ['read', 'write']}, {})
        """
        wanted = None if names is None else list_of(names, "names")
        with self._lock:
            if wanted is None:
                return dict(self._values)
            return {name: self._values[name] for name in wanted if name in self._values}
