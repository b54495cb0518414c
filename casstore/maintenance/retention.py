"""Retention: which revisions, labels and sessions stay, and the removal of the others.

    set_policy(store, Policy(last=10, daily=7))     what stays
    for session in plan(store): ...                 what would go, and why the rest stays
    execute(store, plan(store))                     removes that

Only rows are removed. gc then removes the objects, and compacting the file reclaims its space.
"""

from __future__ import annotations

from casstore.maintenance.policy import Policy, find_policy, set_policy
from casstore.maintenance.retention_execution import (
    Overridden,
    RetentionReport,
    Skipped,
    execute,
)
from casstore.maintenance.retention_plan import Kept, Plan, Removed, SessionPlan
from casstore.maintenance.retention_planning import plan

__all__ = [
    "Kept",
    "Overridden",
    "Plan",
    "Policy",
    "Removed",
    "RetentionReport",
    "SessionPlan",
    "Skipped",
    "execute",
    "find_policy",
    "plan",
    "set_policy",
]
