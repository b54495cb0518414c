"""LangGraph on a store: checkpoints, and the long-term store of an application.

    with CasstoreSaver.from_path("agents") as saver:
        graph = builder.compile(checkpointer=saver)

Needs the extra: ``pip install '.[langgraph]'`` in the clone of casstore.
"""

from __future__ import annotations

try:
    import langgraph.checkpoint.base as _  # noqa: F401
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "LangGraph is not installed: pip install '.[langgraph]' in the clone of casstore",
        name=exc.name,
    ) from exc

from casstore.adapters.langgraph.items import CasstoreStore
from casstore.adapters.langgraph.moving_in import ImportReport
from casstore.adapters.langgraph.moving_items import ItemsReport
from casstore.adapters.langgraph.saver import CasstoreSaver
from casstore.adapters.langgraph.serializer import StrictSerializer
from casstore.adapters.langgraph.sqlite_import import import_sqlite
from casstore.adapters.langgraph.sqlite_store_import import import_sqlite_store

__all__ = [
    "CasstoreSaver",
    "CasstoreStore",
    "ImportReport",
    "ItemsReport",
    "StrictSerializer",
    "import_sqlite",
    "import_sqlite_store",
]
