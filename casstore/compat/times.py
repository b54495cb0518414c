"""Times as databases of Python programs spell them, into numbers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def utc_us(text: Any) -> int:
    """Microseconds since 1970 of a time in ISO 8601, as SQLite and Python write it.

    Without a zone it is UTC, as SQLite's own clock is. ValueError if it is none.
    """
    if type(text) is not str:
        raise ValueError(f"{text!r} is no time")
    told = datetime.fromisoformat(text)
    told = told if told.tzinfo is not None else told.replace(tzinfo=UTC)
    return (told - _EPOCH) // timedelta(microseconds=1)
