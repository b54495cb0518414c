"""Working state: what an agent has in mind. In memory only, and gone with the session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from casstore.engine.forks import Lock
from casstore.session.arguments import list_of


class WorkingState:
    """Values by name, for any number of threads. Nothing here is ever written anywhere."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Remember a value."""
        with self._lock:
            self._values[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or the default."""
        with self._lock:
            return self._values.get(name, default)

    def names(self) -> list[str]:
        """What there is, in order of setting."""
        with self._lock:
            return list(self._values)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()

    def chosen(self, names: Iterable[str] | None) -> dict[str, Any]:
        """The values of these names, where there are any; None: all. An empty list: nothing."""
        wanted = None if names is None else list_of(names, "names of working state")
        with self._lock:
            if wanted is None:
                return dict(self._values)
            return {name: self._values[name] for name in wanted if name in self._values}
