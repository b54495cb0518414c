"""Where something was found; of several, the lower one counts."""

from __future__ import annotations

from typing import Final

from casstore.engine.protocol import TABLES

#: The tree of the newest meta page.
NEWEST: Final = 0
#: The tree of the meta page before it: the state one commit earlier.
BEFORE: Final = 1
#: A page that no tree leads to.
STRAY: Final = 2

#: Tables whose rows are worth saving.
SAVED_TABLES: Final = TABLES
