"""Maintenance of a store: collection, retention, checks and repair, copies, bundles, erasure.

    collection   gc, vacuum, pack, compact, space, automatic; roots, rows, keepers
    retention    retention: policy, retention_plan, retention_planning; expiring, uncommitted,
                 condemned
    checks       check: objects_check, rows_check, records_check, graph_proof; findings, consistency
    repair       check.rebuild, recover, salvage: salvaged_rows, loss_naming
    copies       backup, copy; export, import_: bundle_file, verify; transfer for all
    erasure      erasure; sharing, contents: what sessions share
    systems      what record systems register, for all of these

Each module has one job, and is loaded when it is first used. A module that does the work of one
command has its name (``import_``, because Python reserves ``import``); ``retention`` and
``erasure`` are named by their field: each makes a plan and executes it. ``store.gc()``,
``store.vacuum()``, ``store.prune()`` and ``store.check()`` call the four that every program needs.

The examples use ``store``, an open store in ``place / "store"``. In it is the session ``s``,
``session``, of two revisions. ``other`` is an empty store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "automatic",
    "backup",
    "check",
    "compact",
    "condemned",
    "contents",
    "copy",
    "erasure",
    "expiring",
    "export",
    "findings",
    "gc",
    "import_",
    "pack",
    "recover",
    "retention",
    "salvage",
    "sharing",
    "space",
    "systems",
    "uncommitted",
    "vacuum",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*[name for name in globals() if name.startswith("__")], *__all__})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            # Imported when it is first used.
            return __import__(f"{__name__}.{name}", fromlist=(name,))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
