"""Imports the runtime database of agent-harness into runs, with its artifacts.

Threads, runs, messages, events, approvals, requests, recovery intents and artifacts keep their ids,
times, states and order. A row whose values the records cannot hold raises CorruptionError with its
name, so that no value is lost unnoticed. Artifacts are read from ``threads/<thread>/runs/<run>/``
and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from casstore.compat.importing import (
    ImportNote,
    ImportReport,
    Presence,
    RowPart,
    columns_bytes,
    other_content,
    paged,
    presence,
    run,
)
from casstore.compat.sqlite_source import SqliteSource, utc_ms
from casstore.errors import (
    CorruptionError,
    ForeignSourceError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    RecordsSchemaError,
)
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.maintenance.progress import Progress
from casstore.records.json_values import loads, storable
from casstore.records.runs.data import (
    PENDING,
    STATUS_OF,
    WAITING,
    Approval,
    Artifact,
    Event,
    RecoveryIntent,
    Run,
    RunRequest,
    Thread,
    ThreadMessage,
)
from casstore.records.runs.inserting import Item, Made, insert, stored
from casstore.records.runs.names import check_id, check_path, same_value, value_digest
from casstore.records.runs.tables import RunTables
from casstore.store import Store, check_store

SourceRow = TypeVar("SourceRow")

_FAMILY: Final = "agent-harness-runtime"
_VERSION: Final = "1"
_DECISIONS: Final = {status: decision for decision, status in STATUS_OF.items()}


def import_agent_harness(
    store: Store,
    source: str | os.PathLike[str],
    *,
    artifacts: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a runtime database and its artifacts.

    ``artifacts`` is the directory that holds ``threads/``, if that is not the database's own.
    ForeignSourceError or RecordsSchemaError if the database is of another program, family or
    version. Notes count values in columns that this release does not know.
    """
    check_store(store)
    with SqliteSource(source) as database:
        _require_schema(database)
        rows = _RuntimeRows(database, Path(artifacts or database.path.parent))
        parts = rows.parts(RunTables(store))
        return run(
            "agent-harness", database, store, parts,
            notes=rows.unread(), dry_run=dry_run, progress=progress,
        )  # fmt: skip


def _require_schema(source: SqliteSource) -> None:
    expected = f"family {_FAMILY!r}, version {_VERSION!r}"
    if "runtime_metadata" not in source.tables:
        raise ForeignSourceError(f"{source.path} is not a runtime database of agent-harness")
    found = dict(source.ask("SELECT key, value FROM runtime_metadata"))
    family, version = found.get("schema_family"), found.get("schema_version")
    if (family, version) != (_FAMILY, _VERSION):
        raise RecordsSchemaError(source.name, f"family {family!r}, version {version!r}", expected)


class _RunItemPart(RowPart[Item]):
    """The rows of one table, in the order in which they are stored."""

    def __init__(
        self,
        tables: RunTables,
        source: SqliteSource,
        name: str,
        query: str,
        item: Callable[[tuple[Any, ...]], Item],
    ) -> None:
        self._tables = tables
        self._source = source
        self._query = query
        self._item = item
        self.name = name

    def count(self) -> int:
        return self._source.number(f"SELECT count(*) FROM ({self._query})")

    def pages(self) -> Iterator[Sequence[Item]]:
        sized = ((columns_bytes(row), self._item(row)) for row in self._source.ask(self._query))
        for page in paged(sized, _sized_bytes):
            yield [item for _, item in page]

    def look(self, page: Sequence[Item]) -> list[Presence]:
        found = stored(self._tables, page)
        for item, there in zip(page, found, strict=True):
            if there is not None and not _is_same(item, there):
                raise other_content(f"one of the {self.name} ({_named(item)})")
        return presence(there is not None for there in found)

    def store(self, rows: Sequence[Item]) -> None:
        insert(self._tables, rows)


def _sized_bytes(sized: tuple[int, Item]) -> int:
    row_bytes, item = sized
    return row_bytes + (item.size_bytes if isinstance(item, Made) else 0)


def _is_same(item: Any, there: Any) -> bool:
    if isinstance(item, Made):
        return bool(item.artifact == there)
    return same_value(list(item), list(there))


def _named(item: Any) -> str:
    names = item.artifact if isinstance(item, Made) else item
    shown = ("thread", "run", "id", "sequence", "number", "path")
    return " ".join([f"{name} {getattr(names, name)!r}" for name in shown if hasattr(names, name)])


# --- rows of the database -------------------------------------------------------------------------

# Each field is named as its column; ``number`` is the position of the row in its thread or run.


class _ThreadRow(NamedTuple):
    thread_id: str
    workspace_id: str
    entry_agent_id: str
    status: str | None
    latest_run_id: str | None
    created_at: Any
    updated_at: Any


class _RunRow(NamedTuple):
    run_id: str
    thread_id: str
    agent_id: str
    execution_mode: str
    adapter_kind: str | None
    created_at: Any
    updated_at: Any
    state: str
    previous_state: str | None
    state_entered_at: Any
    last_transition_at: Any
    resumable: Any
    checkpoint_ref: str | None
    number: int


class _MessageRow(NamedTuple):
    id: str
    thread_id: str
    role: str
    run_id: str | None
    created_at: Any
    content: Any
    number: int


class _EventRow(NamedTuple):
    thread_id: str
    run_id: str
    sequence: Any
    created_at: Any
    event: Any


class _ApprovalRow(NamedTuple):
    approval_id: str
    pending_action_id: str
    thread_id: str
    run_id: str
    tool_call_id: Any
    tool_name: str
    status: str
    requested_at: Any
    resolved_at: Any
    checkpoint_ref: str | None
    allowed_decisions: Any
    input_preview: Any
    event_refs: Any


class _RequestRow(NamedTuple):
    thread_id: str
    run_id: str
    request: Any


class _IntentRow(NamedTuple):
    thread_id: str
    run_id: str
    intent: Any


class _ArtifactRow(NamedTuple):
    artifact_id: str
    thread_id: str
    run_id: str
    kind: str
    created_at: Any
    path: str
    number: int


# Releases name some columns differently.
_OTHER_NAMES: Final = {
    "path": ("relative_path", "artifact_path"),
    **{
        name: (f"{name}_json",)
        for name in (
            "content", "event", "allowed_decisions", "input_preview", "event_refs", "request",
            "intent",
        )
    },
}  # fmt: skip


class _RuntimeRows:
    """Converts rows of the database into items of runs."""

    def __init__(self, source: SqliteSource, root: Path) -> None:
        self._source = source
        self._root = root
        # The columns that are read, by their tables.
        self._read: dict[str, set[str]] = {}

    def parts(self, tables: RunTables) -> list[_RunItemPart]:
        """All kinds, owners first.

        ForeignSourceError if a table or column is missing, CorruptionError if a row has no owner.
        """

        def part(
            name: str,
            table: str,
            row: Callable[..., SourceRow],
            convert: Callable[[SourceRow], Item],
            order: str,
            number: str = "",
        ) -> _RunItemPart:
            """The rows of a table as ``row``; ``number`` is the window of its field ``number``."""
            columns = [
                f"row_number() OVER ({number})" if field == "number" else self._column(table, field)
                for field in row._fields  # type: ignore[attr-defined]
            ]
            query = f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}"
            return _RunItemPart(
                tables, self._source, name, query, lambda values: convert(row(*values))
            )

        of_run = "thread_id, run_id"
        parts = [
            part("threads", "threads", _ThreadRow, self._thread, "updated_at, thread_id"),
            part(
                "runs", "runs", _RunRow, self._run, "updated_at, run_id",
                number="PARTITION BY thread_id ORDER BY created_at, run_id",
            ),
            part(
                "messages", "thread_messages", _MessageRow, self._message,
                "thread_id, created_at, id",
                number="PARTITION BY thread_id ORDER BY created_at, id",
            ),
            part("events", "events", _EventRow, self._event, f"{of_run}, sequence"),
            part(
                "approvals", "approvals", _ApprovalRow, self._approval, "requested_at, approval_id"
            ),
            part("run requests", "run_requests", _RequestRow, self._request, of_run),
            part("recovery intents", "recovery_intents", _IntentRow, self._intent, of_run),
            part(
                "artifacts", "artifacts", _ArtifactRow, self._artifact,
                f"{of_run}, created_at, artifact_id",
                number=f"PARTITION BY {of_run} ORDER BY created_at, artifact_id",
            ),
        ]  # fmt: skip
        self._require_owners()
        return parts

    def unread(self) -> list[ImportNote]:
        """Notes about columns that are not read; valid after ``parts``."""
        return [
            note
            for table, known in self._read.items()
            for note in self._source.unread(table, known)
        ]

    def _column(self, table: str, field: str) -> str:
        """The column of a table for a field."""
        columns = self._source.columns(table)
        names = (field, *_OTHER_NAMES.get(field, ()))
        for name in names:
            if name in columns:
                self._read.setdefault(table, set()).add(name)
                return name
        raise ForeignSourceError(
            f"{self._source.path} has no column {' or '.join(names)} in table {table!r}; "
            "this release cannot import such a database"
        )

    def _require_owners(self) -> None:
        """Raise CorruptionError if a row names a thread or a run that does not exist."""
        of_thread = "SELECT 1 FROM threads WHERE thread_id = it.thread_id"
        of_run = "SELECT 1 FROM runs WHERE (thread_id, run_id) = (it.thread_id, it.run_id)"
        for table in [each for each in self._read if each != "threads"]:
            owner = of_thread if table in ("runs", "thread_messages") else of_run
            orphan = self._source.first(
                f"SELECT thread_id, run_id FROM {table} AS it WHERE NOT EXISTS ({owner}) LIMIT 1"
            )
            if orphan is not None:
                raise CorruptionError(
                    f"{self._source.path} has rows in {table!r} of thread {orphan[0]!r}, run "
                    f"{orphan[1]!r}, which it does not have; repair or delete them there"
                )

    # --- threads and runs -------------------------------------------------------------------

    def _thread(self, row: _ThreadRow) -> Thread:
        what = f"thread {row.thread_id!r}"
        agent = row.entry_agent_id
        optional = (row.status, row.latest_run_id)
        self._names(what, row.thread_id, row.workspace_id, agent, *filter(None, optional))
        return Thread(
            id=row.thread_id,
            workspace=row.workspace_id,
            agent=agent,
            status=row.status or None,
            latest_run=row.latest_run_id or None,
            created_at_ms=self._time(row.created_at, what),
            updated_at_ms=self._time(row.updated_at, what),
            runs=0,
            messages=0,
            events=0,
            artifacts=0,
            approvals=0,
        )

    def _run(self, row: _RunRow) -> Run:
        what = f"run {row.run_id!r}"
        state, mode = row.state, row.execution_mode
        optional = (row.adapter_kind, row.previous_state, row.checkpoint_ref)
        self._names(what, row.run_id, row.thread_id, row.agent_id, mode, state)
        self._names(what, *filter(None, optional))
        if bool(row.resumable) is not (state == WAITING):
            raise self._damaged(what, f"is {state!r}, and resumable is {row.resumable!r}")
        return Run(
            id=row.run_id,
            thread=row.thread_id,
            agent=row.agent_id,
            mode=mode,
            adapter=row.adapter_kind or mode,
            created_at_ms=self._time(row.created_at, what),
            updated_at_ms=self._time(row.updated_at, what),
            state=state,
            previous_state=row.previous_state or None,
            state_entered_at_ms=self._time(row.state_entered_at, what),
            last_transition_at_ms=self._time(row.last_transition_at, what),
            checkpoint=row.checkpoint_ref or None,
            number=row.number,
            events=0,
            artifacts=0,
        )

    # --- events and messages ------------------------------------------------------------------

    def _message(self, row: _MessageRow) -> ThreadMessage:
        what = f"message {row.id!r}"
        self._names(what, row.thread_id, row.role, *filter(None, [row.run_id]))
        value, time = self._json(row.content, what), self._time(row.created_at, what)
        return ThreadMessage(
            thread=row.thread_id,
            number=row.number,
            role=row.role,
            content=value,
            run=row.run_id or None,
            created_at_ms=time,
        )

    def _event(self, row: _EventRow) -> Event:
        what = f"event {row.sequence!r} of run {row.run_id!r}"
        if type(row.sequence) is not int or row.sequence < 0:
            raise self._damaged(what, "has an invalid sequence")
        value, time = self._json(row.event, what), self._time(row.created_at, what)
        return Event(row.thread_id, row.run_id, row.sequence, value, time)

    # --- approvals ----------------------------------------------------------------------------

    def _approval(self, row: _ApprovalRow) -> Approval:
        what, status = f"approval {row.approval_id!r}", row.status
        self._names(what, row.approval_id, row.pending_action_id, row.thread_id, row.run_id)
        self._names(what, row.tool_name, status, *filter(None, [row.checkpoint_ref]))
        allowed = self._json(row.allowed_decisions, what)
        preview = self._json(row.input_preview, what)
        events = self._json(row.event_refs, what)
        if type(allowed) is not list or not all(type(one) is str for one in allowed):
            raise self._damaged(what, f"has invalid allowed_decisions {allowed!r}")
        if type(events) is not list:
            raise self._damaged(what, f"has invalid event_refs {events!r}")
        if status == PENDING and row.resolved_at is not None:
            raise self._damaged(what, "is both pending and resolved")
        decision = _DECISIONS.get(status, status)
        resolved = None if row.resolved_at is None else self._time(row.resolved_at, what)
        return Approval(
            id=row.approval_id,
            thread=row.thread_id,
            run=row.run_id,
            action=row.pending_action_id,
            tool_call=str(row.tool_call_id or ""),
            tool=row.tool_name,
            status=status,
            allowed=tuple(allowed),
            decision=decision if decision in allowed else None,
            requested_at_ms=self._time(row.requested_at, what),
            resolved_at_ms=resolved,
            preview=preview,
            checkpoint=row.checkpoint_ref or None,
            events=tuple(events),
        )

    # --- requests and recovery intents ----------------------------------------------------------

    def _request(self, row: _RequestRow) -> RunRequest:
        what = f"the request of run {row.run_id!r}"
        value = self._object(row.request, what, {"input", "savedAt"}, {"invocation"})
        given, invocation = storable(value["input"]), storable(value.get("invocation"))
        saved = self._time(value["savedAt"], what)
        return RunRequest(row.run_id, row.thread_id, given, invocation, saved)

    def _intent(self, row: _IntentRow) -> RecoveryIntent:
        what = f"the recovery intent of run {row.run_id!r}"
        needed = {"kind", "savedAt", "resumePayload", "attempts"}
        value = self._object(row.intent, what, needed, {"checkpointRef"})
        checkpoint, attempts, kind = value.get("checkpointRef"), value["attempts"], value["kind"]
        if type(attempts) is not int or attempts < 0 or type(kind) is not str:
            raise self._damaged(what, f"has invalid kind {kind!r} or attempts {attempts!r}")
        if checkpoint is not None and type(checkpoint) is not str:
            raise self._damaged(what, f"has invalid checkpointRef {checkpoint!r}")
        for value_given in (kind, checkpoint, attempts):
            # ``storable`` returns a dict for what can only be stored as a text of JSON, which a
            # payload may be, and these fields may not.
            if type(storable(value_given)) is dict:
                raise self._damaged(what, f"holds {value_given!r:.80}, which cannot be stored")
        return RecoveryIntent(
            run=row.run_id,
            thread=row.thread_id,
            kind=kind,
            payload=storable(value["resumePayload"]),
            checkpoint=checkpoint or None,
            attempts=attempts,
            saved_at_ms=self._time(value["savedAt"], what),
        )

    def _object(
        self, text: Any, what: str, needed: set[str], allowed: set[str]
    ) -> Mapping[str, Any]:
        value = self._json(text, what, whole=True)
        if type(value) is not dict or not needed <= value.keys() <= needed | allowed:
            raise self._damaged(
                what, f"is not a map with the keys {', '.join(sorted(needed))}, or has unknown keys"
            )
        return value

    # --- artifacts --------------------------------------------------------------------------------

    def _artifact(self, row: _ArtifactRow) -> Made:
        what = f"artifact {row.artifact_id!r} of run {row.run_id!r}"
        self._names(what, row.artifact_id, row.thread_id, row.run_id, row.kind)
        content, size_bytes = self._content(row.thread_id, row.run_id, row.path, what)
        is_blob = type(content) is bytes
        made = Artifact(
            thread=row.thread_id,
            run=row.run_id,
            id=row.artifact_id,
            kind=row.kind,
            path=row.path,
            digest=Digest.of_blob(content) if is_blob else value_digest(content),
            is_blob=is_blob,
            created_at_ms=self._time(row.created_at, what),
            number=row.number,
        )
        return Made(made, content, size_bytes)

    def _content(self, thread: str, run: str, path: str, what: str) -> tuple[Any, int]:
        """The content of an artifact's file, a JSON value or bytes, and its length."""
        file = self._file(thread, run, path, what)
        try:
            with file.open("rb") as opened:
                data = opened.read(DEFAULT_MAX_BYTES + 1)
        except OSError as exc:
            raise NotFoundError(f"{what} cannot be read: {exc}") from exc
        if len(data) > DEFAULT_MAX_BYTES:
            raise LimitError(f"{file} has more than {DEFAULT_MAX_BYTES} bytes")
        try:
            return storable(loads(data.decode())), len(data)
        except (ValueError, RecursionError):
            return data, len(data)

    def _file(self, thread: str, run: str, path: str, what: str) -> Path:
        """The file of an artifact, inside the directory of its run."""
        try:
            for name in (thread, run):
                if "/" in check_path(name):
                    raise InvalidInputError(f"{name!r} is not a directory name")
            check_path(path)
        except InvalidInputError as exc:
            raise self._damaged(what, f"has a path outside its directory: {exc}") from exc
        try:
            home = self._root.resolve(strict=True) / "threads" / thread / "runs" / run
            file = (home / path).resolve(strict=True)
        except (OSError, RuntimeError) as exc:
            raise NotFoundError(
                f"{what} has no file: {exc}; pass the directory that holds threads/ as artifacts, "
                "or delete the row"
            ) from exc
        # ``resolve`` has followed symbolic links; none may lead out of the run's directory.
        if not file.is_relative_to(home) or not file.is_file():
            raise self._damaged(what, f"has the path {file}, which is not a file in its directory")
        return file

    # --- values ---------------------------------------------------------------------------------

    def _json(self, text: Any, what: str, *, whole: bool = False) -> Any:
        """The value of a JSON text in its stored form, or None; with ``whole``, as decoded."""
        if text is None:
            return None
        try:
            value = loads(text)
        except RecursionError:
            # Too deep to decode: stored as its text.
            return {"json": text.encode()}
        except (TypeError, ValueError) as exc:
            raise self._damaged(what, f"is not JSON: {exc}") from exc
        return value if whole else storable(value)

    def _names(self, what: str, *texts: Any) -> None:
        """Raise CorruptionError unless each text is a valid id."""
        for text in texts:
            try:
                check_id(text, "a name")
            except InvalidInputError as exc:
                raise self._damaged(what, f"cannot be stored: {exc}") from exc

    def _time(self, text: Any, what: str) -> int:
        """A time of the database in milliseconds."""
        try:
            return utc_ms(text)
        except ValueError as exc:
            raise self._damaged(what, f"has no valid time: {exc}") from exc

    def _damaged(self, what: str, reason: str) -> CorruptionError:
        return CorruptionError(
            f"{self._source.path}: {what} {reason}; correct or delete it there, and import again"
        )
