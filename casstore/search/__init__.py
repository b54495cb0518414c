"""Full-text search over what agents have said: nodes, components, entries of record systems.

``Store.search`` and ``Session.search`` come here through the entry point ``search``. The index is
derived: a file in the store's directory (``sqlite``) or tables in its schema on a server
(``postgres``). It has each text once, not once for each session, so forks share what is indexed
(``lineage``). A search first brings the index up to date (``indexing``), and then checks each hit
against the current heads of the sessions (``answering``).
"""

from __future__ import annotations

from casstore.search.searching import SearchIndexReport, rebuild, remove, search, update
from casstore.session.found import Hit

__all__ = ["Hit", "SearchIndexReport", "rebuild", "remove", "search", "update"]
