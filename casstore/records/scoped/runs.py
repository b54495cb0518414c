"""Grants of runs: what a run may do, fixed when it begins and checked by every call.

The row of a run holds the identity of the caller, the capabilities, the policy, the context and
the keys of its scopes. Later changes of a binding do not change it, and all processes read the
same row. Each call of a run reads the row in the same transaction as the state, and each write
makes the row a condition: calls after the end of the run are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from casstore.errors import CorruptionError, InvalidInputError, RunFrozenError
from casstore.records.schema import RowPlace
from casstore.records.scoped import policy as policies
from casstore.records.scoped.policy import Quota, Reason, StatePolicy
from casstore.records.scoped.scope_keys import Context, checked, scope_keys
from casstore.records.scoped.tables import RunGrant, ScopedTables
from casstore.session.arguments import check_ms, list_of
from casstore.session.attempts import read_again, transact, transaction
from casstore.session.keys import id_bytes
from casstore.session.records import Draft, Record

#: The capability that a run needs to use state.
STATE: Final = "state"
#: The lifetime of a run by default: one day.
RUN_MS: Final = 86_400_000


class RunGrants:
    """Begins, renews and ends runs."""

    def __init__(self, tables: ScopedTables) -> None:
        self._tables = tables

    def begin(
        self,
        run_id: str,
        context: Context,
        policy: StatePolicy,
        *,
        caller: str,
        capabilities: Sequence[str],
        ttl_ms: int,
    ) -> RunGrant:
        """Store the grant of a run; returns the stored grant if the run is active with the same."""
        id_bytes(run_id, "a run")
        if type(caller) is not str or not caller.strip():
            raise InvalidInputError(f"caller must be a str that is not blank, got {caller!r:.80}")
        id_bytes(caller, "a caller")
        granted = list_of(capabilities, "capabilities")
        for capability in granted:
            id_bytes(capability, "a capability")
        policies.check_policy(policy)
        check_ms(ttl_ms, "ttl_ms", least=1)
        quotas = {scope: Quota(*quota) for scope, quota in policy.quotas.items()}
        frozen = RunGrant(
            id=run_id,
            caller=caller,
            capabilities=tuple(sorted(set(granted))),
            policy=policy._replace(scopes=tuple(policy.scopes), quotas=quotas),
            context=checked(context),
            scope_keys=scope_keys(context),
            started_ms=0,
            expires_ms=0,
        )
        tables = self._tables

        def attempt() -> RunGrant:
            record, before = self._read(run_id)
            now_ms = tables.store.engine.now_ms()
            if before is not None and before.expires_ms > now_ms:
                if not _is_same(before, frozen):
                    raise RunFrozenError(run_id)
                return before
            draft = Draft(tables.store)
            draft.expect(tables.runs, (run_id,), record)
            run = frozen._replace(started_ms=now_ms, expires_ms=now_ms + ttl_ms)
            tables.runs.put(draft, run, before)
            draft.commit()
            return run

        return transact(f"run {run_id!r}", attempt)

    def find(self, run_id: str) -> RunGrant | None:
        """The grant of a run; None if the run does not exist or has ended."""
        _, run = read_again(lambda: self._read(run_id), (CorruptionError,))
        now_ms = self._tables.store.engine.now_ms()
        return run if run is not None and run.expires_ms > now_ms else None

    @transaction("run {run_id!r}")
    def renew(self, run_id: str, ttl_ms: int) -> bool:
        """Extend a run to ``ttl_ms`` from now; False if it has ended."""
        check_ms(ttl_ms, "ttl_ms", least=1)
        tables = self._tables
        record, run = self._read(run_id)
        now_ms = tables.store.engine.now_ms()
        if run is None or run.expires_ms <= now_ms:
            return False
        draft = Draft(tables.store)
        draft.expect(tables.runs, (run_id,), record)
        tables.runs.put(draft, run._replace(expires_ms=now_ms + ttl_ms), run)
        draft.commit()
        return True

    @transaction("run {run_id!r}")
    def end(self, run_id: str) -> bool:
        """End a run: further calls of it are refused. True if it had not ended."""
        tables = self._tables
        record, run = self._read(run_id)
        if run is None:
            return False
        draft = Draft(tables.store)
        draft.expect(tables.runs, (run_id,), record)
        tables.runs.remove(draft, run)
        draft.commit()
        return run.expires_ms > tables.store.engine.now_ms()

    def _read(self, run_id: str) -> tuple[Record | None, RunGrant | None]:
        """The row of a run and its grant; both None if the run does not exist."""
        record = self._tables.runs.find(run_id)
        return record, self._tables.runs.decode_found(record)


class RunGuard:
    """Refuses calls of a run once it has ended."""

    def __init__(self, tables: ScopedTables, run: RunGrant) -> None:
        self._tables = tables
        self._run = run

    @property
    def place(self) -> RowPlace:
        """The row of the run."""
        return (self._tables.runs, (self._run.id,))

    def check(self, record: Record | None, now_ms: int) -> None:
        """StateRefusedError if the run has ended, also if another run has its id now."""
        run = self._tables.runs.decode_found(record)
        # A later run of this id may have another caller or policy.
        if run is None or run.expires_ms <= now_ms or not _is_same(run, self._run):
            refuse_ended(self._run.id)


def _is_same(run: RunGrant, other: RunGrant) -> bool:
    """True if both grants allow the same to the same caller."""
    return run._replace(started_ms=0, expires_ms=0) == other._replace(started_ms=0, expires_ms=0)


def refuse_ended(run_id: str) -> NoReturn:
    """Refuse a call of a run that has ended."""
    policies.refuse(Reason.RUN_NOT_ACTIVE, f"run {run_id!r} does not exist, or has ended")


def admitted(tables: ScopedTables, run_id: str | None, caller: str | None) -> RunGrant:
    """The grant of a run for its caller; else StateRefusedError, in the order of ``Reason``."""
    if not run_id:
        policies.refuse(Reason.NO_RUN_ID, "run_id is missing: state is accessed through a run")
    run = RunGrants(tables).find(run_id)
    if run is None:
        refuse_ended(run_id)
    if not caller:
        policies.refuse(Reason.NO_CALLER, f"caller must be given for run {run_id!r}")
    if caller != run.caller:
        policies.refuse(
            Reason.WRONG_CALLER, f"run {run_id!r} belongs to another caller than {caller!r}"
        )
    if STATE not in run.capabilities:
        policies.refuse(Reason.NOT_CAPABLE, f"run {run_id!r} lacks the capability {STATE!r}")
    return run
