"""Threads of agents and their runs: states, events, approvals, recovery, artifacts.

``Runs(store)`` is the entry point; ``steps`` has the operations that one write can combine.
"""

from casstore.records.runs.data import (
    COMMITTED,
    EXPIRED,
    KEEP,
    PENDING,
    RUNNING,
    TERMINAL,
    WAITING,
    Approval,
    Artifact,
    Event,
    Page,
    RecoveryIntent,
    Run,
    RunRequest,
    SessionCheckpoint,
    Thread,
    ThreadMessage,
)
from casstore.records.runs.runs import Committed, Runs

__all__ = [
    "COMMITTED",
    "EXPIRED",
    "KEEP",
    "PENDING",
    "RUNNING",
    "TERMINAL",
    "WAITING",
    "Approval",
    "Artifact",
    "Committed",
    "Event",
    "Page",
    "RecoveryIntent",
    "Run",
    "RunRequest",
    "Runs",
    "SessionCheckpoint",
    "Thread",
    "ThreadMessage",
]
