"""A damaged store, dug out page by page: what proves itself is taken, wherever it lies.

LMDB is not asked. What the tree of the newest meta page reaches counts first; then the tree
of the meta page before it, which is the state one commit earlier; then pages that nothing
leads to. Those may be left over from any time. Objects and slabs prove themselves whatever
their age: ids are not given twice and a digest names its bytes. A row of an old page is true
but may be outdated, so such rows count only where the newest tree has lost the place for
them.

``digging`` goes through the pages; ``found_rows`` and ``found_slabs`` hold what it finds, and
``gaps`` where something is missing; ``keyless`` finds out where slabs and dictionaries belong
that lost their keys; ``naming`` and ``reaching`` tell what of it is needed.
"""

from __future__ import annotations

from casstore.engine.lmdb.excavation.excavation import Excavation, require_data_file
from casstore.engine.lmdb.excavation.gaps import LostRows
from casstore.engine.lmdb.excavation.ranks import NEWEST
from casstore.engine.lmdb.excavation.reaching import Marked

__all__ = ["NEWEST", "Excavation", "LostRows", "Marked", "require_data_file"]
