"""Workspaces: the files of a directory, committed and restored with a conversation.

``Workspace(path).commit(session, …)`` stores nodes, state and files in one revision;
``restore(session, at=…, into=…)`` gives the files back. ``docs/guides/workspace.md`` shows both.
"""

from casstore.workspace.changes import FileChange
from casstore.workspace.restoring import Conflict, RestorePlan, RestoreReport
from casstore.workspace.rules import DEFAULT_IGNORE
from casstore.workspace.workspace import (
    MAX_FILE_BYTES,
    LogEntry,
    Snapshot,
    Workspace,
    diff,
    diff_snapshots,
    diff_text,
    find_snapshot,
    restore,
    snapshots,
)

__all__ = [
    "DEFAULT_IGNORE",
    "MAX_FILE_BYTES",
    "Conflict",
    "FileChange",
    "LogEntry",
    "RestorePlan",
    "RestoreReport",
    "Snapshot",
    "Workspace",
    "diff",
    "diff_snapshots",
    "diff_text",
    "find_snapshot",
    "restore",
    "snapshots",
]
