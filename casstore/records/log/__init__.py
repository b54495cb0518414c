"""Sessions of numbered messages, with folds, tool calls that wait, usage, and sessions below."""

from casstore.records.log.data import (
    Counters,
    Fold,
    LogSession,
    Message,
    NewMessage,
    Pending,
    RoundUsage,
    Tokens,
    UsageTotals,
)
from casstore.records.log.log import SessionLog

__all__ = [
    "Counters",
    "Fold",
    "LogSession",
    "Message",
    "NewMessage",
    "Pending",
    "RoundUsage",
    "SessionLog",
    "Tokens",
    "UsageTotals",
]
