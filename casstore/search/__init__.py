"""Full-text search over what agents have said: nodes, components, entries of record systems.

``Store.search`` and ``Session.search`` come here through the entry point ``search``. The index is
derived: a file in the store's directory (``sqlite``) or tables in its schema on a server
(``postgres``). It belongs to contents, not to sessions, so forks share it (``lineage``). A search
brings it up to date (``indexing``), and proves each hit with the present heads (``answering``).
"""

from __future__ import annotations

from casstore.search.searching import SearchIndexReport, rebuild, remove, search, update
from casstore.session.found import Hit

__all__ = ["Hit", "SearchIndexReport", "rebuild", "remove", "search", "update"]
