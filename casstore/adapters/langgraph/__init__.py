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

from casstore.adapters.langgraph.checkpoint_import import import_checkpoints
from casstore.adapters.langgraph.item_import import import_items
from casstore.adapters.langgraph.items import CasstoreStore
from casstore.adapters.langgraph.saver import CasstoreSaver
from casstore.adapters.langgraph.serializer import StrictSerializer

__all__ = [
    "CasstoreSaver",
    "CasstoreStore",
    "StrictSerializer",
    "import_checkpoints",
    "import_items",
]
