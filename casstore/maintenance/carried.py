"""Which rows go along when a store goes elsewhere: the list that copies and salvage keep to.

A table that is added to an engine must be put into one of these, or a copy would lose it.
"""

from __future__ import annotations

from typing import Final

from casstore.errors import InvalidInputError
from casstore.session import keys

#: Keyed by session, and carried session by session.
OF_SESSIONS: Final = (
    "heads",
    "sessions",
    "tombstones",
    "history",
    "queue",
    "attachments",
    "receipts",
    "leases",
)
#: Carried row by row. Of these, ``retention`` speaks of sessions, too.
OF_THE_STORE: Final = ("pins", "records", "retention")
#: Every table there is.
CARRIED: Final = (*OF_SESSIONS, *OF_THE_STORE)


def owner(table: str, key: bytes) -> bytes | None:
    """The key of the session that a row belongs to; None if it belongs to none."""
    if table == "retention":
        try:
            return keys.retention_session(key)
        except InvalidInputError:
            # Of a kind that this release does not know, so of nobody that it knows.
            return None
    return keys.session_part(key) if table in OF_SESSIONS else None
