"""What a run may do, frozen when it begins, and the gate that it comes through.

The row of a run holds the caller's identity, the capabilities, the policy, the context and
the keys of its scopes. Nothing that happens to a binding later changes them, and every process
sees the same. Each call through the gate reads the row together with the state that it is
about, and a write expects the row to be there still: what comes after the end is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    RunFrozenError,
)
from casstore.records.scoped import policy as policies
from casstore.records.scoped.layout import Tables
from casstore.records.scoped.policy import Policy, Reason
from casstore.records.scoped.scope_keys import Context, checked, scope_keys
from casstore.session.arguments import list_of
from casstore.session.attempts import Attempts, read_again
from casstore.session.keys import id_bytes
from casstore.session.records import Draft, Record, Table

#: What a run must be capable of to reach state.
STATE: Final = "state"
#: How long a run lasts that is not renewed and does not end: a day.
RUN_MS: Final = 86_400_000


class Run(NamedTuple):
    """What a run may do, as it was frozen.

    >>> run = state.begin_run("run-1", context, caller="me/agent")
    >>> run.caller, run.policy.scopes
    ('me/agent', ('conversation', 'actor'))
    """

    id: str
    caller: str
    capabilities: tuple[str, ...]
    policy: Policy
    context: Context
    #: By scope; those that the context has no identity for are missing.
    scope_keys: dict[str, str]
    started_ms: int
    expires_ms: int


class Runs:
    """Begins, renews and ends runs."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def begin(
        self,
        run_id: str,
        context: Context,
        policy: Policy,
        *,
        caller: str,
        capabilities: Sequence[str],
        ttl_ms: int,
    ) -> Run:
        """Freeze what a run may do; begun again with the same, it is what it was."""
        id_bytes(run_id, "a run")
        if type(caller) is not str or not caller.strip():
            raise InvalidInputError("a run has a caller, whose identity is a text")
        id_bytes(caller, "a caller")
        granted = list_of(capabilities, "capabilities")
        for capability in granted:
            id_bytes(capability, "a capability")
        policies.check_policy(policy)
        frozen = [
            caller,
            sorted(set(granted)),
            policy.plain(),
            list(checked(context)),
            scope_keys(context),
        ]
        _check_ttl(ttl_ms)
        tables = self._tables
        attempts = Attempts(f"run {run_id!r}")
        while True:
            attempts.begin()
            record, before = self._read(run_id)
            now_ms = tables.store.engine.now_ms()
            if before is not None and before.expires_ms > now_ms:
                if not _is_same(before, _run(run_id, [*frozen, 0, 0])):
                    raise RunFrozenError(run_id)
                return before
            draft = Draft(tables.store)
            draft.expect(tables.runs, (run_id,), record)
            self._forget(draft, before)
            draft.put(tables.runs, (run_id,), [*frozen, now_ms, now_ms + ttl_ms])
            if context.actor is not None:
                place = (context.workspace_id, context.bot_id)
                draft.put(tables.run_actors, (*context.actor, run_id), list(place))
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return _run(run_id, [*frozen, now_ms, now_ms + ttl_ms])

    def find(self, run_id: str) -> Run | None:
        """A run that goes on; None if there is none, or if it has ended."""
        run = self._read(run_id)[1]
        now_ms = self._tables.store.engine.now_ms()
        return run if run is not None and run.expires_ms > now_ms else None

    def renew(self, run_id: str, ttl_ms: int) -> bool:
        """Let a run last so long from now on; False if it does not go on."""
        _check_ttl(ttl_ms)
        tables = self._tables
        attempts = Attempts(f"run {run_id!r}")
        while True:
            attempts.begin()
            record, run = self._read(run_id)
            now_ms = tables.store.engine.now_ms()
            if run is None or run.expires_ms <= now_ms:
                return False
            draft = Draft(tables.store)
            draft.expect(tables.runs, (run_id,), record)
            draft.put(tables.runs, (run_id,), _plain(run._replace(expires_ms=now_ms + ttl_ms)))
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return True

    def end(self, run_id: str) -> bool:
        """End a run: from now on the gate is closed to it. Was it there?"""
        tables = self._tables
        attempts = Attempts(f"run {run_id!r}")
        while True:
            attempts.begin()
            record, run = self._read(run_id)
            if run is None:
                return False
            draft = Draft(tables.store)
            draft.expect(tables.runs, (run_id,), record)
            draft.delete(tables.runs, (run_id,))
            self._forget(draft, run)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return run.expires_ms > tables.store.engine.now_ms()

    def _read(self, run_id: str) -> tuple[Record | None, Run | None]:
        """The row of a run and what it says; what has ended in between is not there."""

        def read() -> tuple[Record | None, Run | None]:
            record = self._tables.runs.find(run_id)
            return record, None if record is None else decode_run(record)

        return read_again(read, (CorruptionError,))

    def _forget(self, draft: Draft, run: Run | None) -> None:
        actor = None if run is None else run.context.actor
        if run is not None and actor is not None:
            draft.delete(self._tables.run_actors, (*actor, run.id))


class RunGuard:
    """Lets calls through while the run goes on that somebody was admitted to."""

    def __init__(self, tables: Tables, run: Run) -> None:
        self._tables = tables
        self._run = run

    @property
    def place(self) -> tuple[Table, tuple[str, ...]]:
        """The row of the run."""
        return (self._tables.runs, (self._run.id,))

    def check(self, record: Record | None, now_ms: int) -> None:
        """StateRefusedError if the run has ended, also if another has begun under its id."""
        run = None if record is None else decode_run(record)
        # What was frozen for another caller, or by another policy, does not speak for this one.
        if run is None or run.expires_ms <= now_ms or not _is_same(run, self._run):
            refuse_ended(self._run.id)


def _is_same(run: Run, other: Run) -> bool:
    """May both do the same, for the same caller?"""
    return run._replace(started_ms=0, expires_ms=0) == other._replace(started_ms=0, expires_ms=0)


def refuse_ended(run_id: str) -> NoReturn:
    """Refuse what is asked for by a run that does not go on."""
    policies.refuse(Reason.RUN_NOT_ACTIVE, f"there is no run {run_id!r}, or it has ended")


def admitted(tables: Tables, run_id: str | None, caller: str | None) -> Run:
    """The run that somebody calls for; StateRefusedError, in the order of ``Reason``, if not."""
    if not run_id:
        policies.refuse(Reason.NO_RUN_ID, "state is reached through a run: give its id")
    run = Runs(tables).find(run_id)
    if run is None:
        refuse_ended(run_id)
    if not caller:
        policies.refuse(Reason.NO_CALLER, f"who calls for run {run_id!r}? give the caller")
    if caller != run.caller:
        policies.refuse(Reason.WRONG_CALLER, f"run {run_id!r} is not one of {caller!r}")
    if STATE not in run.capabilities:
        policies.refuse(Reason.NOT_CAPABLE, f"run {run_id!r} was not given access to state")
    return run


def decode_run(record: Record) -> Run:
    """The row of a run."""
    return _run(record.key[0], record.value)


def _plain(run: Run) -> list[Any]:
    """A run as its row holds it."""
    return [
        run.caller,
        list(run.capabilities),
        run.policy.plain(),
        list(run.context),
        run.scope_keys,
        run.started_ms,
        run.expires_ms,
    ]


def _run(run_id: str, told: Any) -> Run:
    try:
        caller, capabilities, policy, context, keys, started_ms, expires_ms = told
        return Run(
            run_id,
            caller,
            tuple(capabilities),
            Policy.from_plain(policy),
            Context(*context),
            keys,
            started_ms,
            expires_ms,
        )
    except (TypeError, ValueError) as exc:
        raise CorruptionError(f"the record of run {run_id!r} is damaged") from exc


def _check_ttl(ttl_ms: Any) -> None:
    if type(ttl_ms) is not int or not 0 < ttl_ms <= MAX_STAMP_MS:
        raise InvalidInputError(f"a run lasts 1 ms or more, not {ttl_ms!r}")
