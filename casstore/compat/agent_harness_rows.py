"""Converts rows of agent-harness's runtime database into threads, runs, and their records.

A row whose values the records cannot hold raises CorruptionError with its name, so that no value
is lost unnoticed. Artifacts are read from ``threads/<thread>/runs/<run>/`` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from casstore.compat.importing import ImportNote
from casstore.compat.sqlite_source import SqliteSource, utc_us
from casstore.errors import (
    CorruptionError,
    ForeignSourceError,
    InvalidInputError,
    LimitError,
    NotFoundError,
)
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
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
from casstore.records.runs.inserting import Item, Made
from casstore.records.runs.names import check_id, check_path, value_digest

_DECISIONS: Final = {status: decision for decision, status in STATUS_OF.items()}


class SourceRows(NamedTuple):
    """The name of one kind of rows, the query for them, and the conversion of a row."""

    name: str
    query: str
    item: Callable[[tuple[Any, ...]], Item]


class RuntimeRows:
    """Converts rows of the database into items of runs."""

    def __init__(self, source: SqliteSource, root: Path) -> None:
        self._source = source
        self._root = root
        # The columns that are read, by their tables.
        self._read: dict[str, set[str]] = {}

    def tables(self) -> list[SourceRows]:
        """All kinds, owners first; ForeignSourceError if a table or column is missing."""
        self._require_owners()
        return [
            SourceRows("threads", self._threads(), self._thread),
            SourceRows("runs", self._runs(), self._run),
            SourceRows("messages", self._messages(), self._message),
            SourceRows("events", self._events(), self._event),
            SourceRows("approvals", self._approvals(), self._approval),
            SourceRows("run requests", self._of_run("run_requests", "request"), self._request),
            SourceRows(
                "recovery intents", self._of_run("recovery_intents", "intent"), self._intent
            ),
            SourceRows("artifacts", self._artifacts(), self._artifact),
        ]

    def unread(self) -> list[ImportNote]:
        """Notes about columns that are not read; valid after ``tables``."""
        return [
            note
            for table, known in self._read.items()
            for note in self._source.unread(table, known)
        ]

    def _column(self, table: str, *names: str) -> str:
        """The column of a table that has one of these names: releases differ in some."""
        columns = self._source.columns(table)
        for name in names:
            if name in columns:
                self._read.setdefault(table, set()).add(name)
                return name
        raise ForeignSourceError(
            f"{self._source.path} has no column {' or '.join(names)} in table {table!r}; "
            "this release cannot import such a database"
        )

    def _columns(self, table: str, *names: str) -> str:
        return ", ".join([self._column(table, name) for name in names])

    def _json_column(self, table: str, name: str) -> str:
        return self._column(table, name, f"{name}_json")

    def _require_owners(self) -> None:
        """Raise CorruptionError if a row names a thread or a run that does not exist."""
        owned = ("thread_messages", "events", "approvals", "run_requests", "recovery_intents")
        for table in ("runs", *owned, "artifacts"):
            self._columns(table, "thread_id", "run_id")
        self._columns("threads", "thread_id")
        for table in ("runs", *owned, "artifacts"):
            query = f"SELECT thread_id, run_id FROM {table} AS it WHERE NOT EXISTS "
            if table in ("runs", "thread_messages"):
                query += "(SELECT 1 FROM threads WHERE thread_id = it.thread_id)"
            else:
                query += (
                    "(SELECT 1 FROM runs WHERE (thread_id, run_id) = (it.thread_id, it.run_id))"
                )
            orphan = next(self._source.ask(query + " LIMIT 1"), None)
            if orphan is not None:
                raise CorruptionError(
                    f"{self._source.path} has rows in {table!r} of thread {orphan[0]!r}, run "
                    f"{orphan[1]!r}, which it does not have; repair or delete them there"
                )

    # --- threads and runs -------------------------------------------------------------------

    def _threads(self) -> str:
        columns = self._columns(
            "threads", "thread_id", "workspace_id", "entry_agent_id", "status", "latest_run_id",
            "created_at", "updated_at",
        )  # fmt: skip
        return f"SELECT {columns} FROM threads ORDER BY updated_at, thread_id"

    def _thread(self, row: tuple[Any, ...]) -> Thread:
        thread, workspace, agent, status, latest, created, updated = row
        what = f"thread {thread!r}"
        self._names(what, thread, workspace, agent, status or agent, latest or agent)
        return Thread(
            thread, workspace, agent, status or None, latest or None, self._time(created, what),
            self._time(updated, what), 0, 0, 0, 0, 0,
        )  # fmt: skip

    def _runs(self) -> str:
        columns = self._columns(
            "runs", "run_id", "thread_id", "agent_id", "execution_mode", "adapter_kind",
            "created_at", "updated_at", "state", "previous_state", "state_entered_at",
            "last_transition_at", "resumable", "checkpoint_ref",
        )  # fmt: skip
        number = "row_number() OVER (PARTITION BY thread_id ORDER BY created_at, run_id)"
        return f"SELECT {columns}, {number} FROM runs ORDER BY updated_at, run_id"

    def _run(self, row: tuple[Any, ...]) -> Run:
        run, thread, agent, mode, adapter, created, updated, state, previous = row[:9]
        entered, moved, resumable, checkpoint, number = row[9:]
        what = f"run {run!r}"
        self._names(what, run, thread, agent, mode, adapter or mode, state, previous or state)
        self._names(what, checkpoint or run)
        if bool(resumable) is not (state == WAITING):
            raise self._damaged(what, f"is {state!r}, and resumable is {resumable!r}")
        return Run(
            run, thread, agent, mode, adapter or mode, self._time(created, what),
            self._time(updated, what), state, previous or None, self._time(entered, what),
            self._time(moved, what), checkpoint or None, number, 0, 0,
        )  # fmt: skip

    # --- events and messages ------------------------------------------------------------------

    def _messages(self) -> str:
        columns = self._columns(
            "thread_messages", "id", "thread_id", "role", "run_id", "created_at"
        )
        content = self._json_column("thread_messages", "content")
        number = "row_number() OVER (PARTITION BY thread_id ORDER BY created_at, id)"
        order = "ORDER BY thread_id, created_at, id"
        return f"SELECT {columns}, {content}, {number} FROM thread_messages {order}"

    def _message(self, row: tuple[Any, ...]) -> ThreadMessage:
        name, thread, role, run, created, content, number = row
        what = f"message {name!r}"
        self._names(what, thread, role, run or thread)
        value = self._json(content, what)
        return ThreadMessage(thread, number, role, value, run or None, self._time(created, what))

    def _events(self) -> str:
        columns = self._columns("events", "thread_id", "run_id", "sequence", "created_at")
        event = self._json_column("events", "event")
        return f"SELECT {columns}, {event} FROM events ORDER BY thread_id, run_id, sequence"

    def _event(self, row: tuple[Any, ...]) -> Event:
        thread, run, sequence, created, event = row
        what = f"event {sequence!r} of run {run!r}"
        if type(sequence) is not int or sequence < 0:
            raise self._damaged(what, "has no number")
        return Event(thread, run, sequence, self._json(event, what), self._time(created, what))

    # --- approvals ----------------------------------------------------------------------------

    def _approvals(self) -> str:
        columns = self._columns(
            "approvals", "approval_id", "pending_action_id", "thread_id", "run_id", "tool_call_id",
            "tool_name", "status", "requested_at", "resolved_at", "checkpoint_ref",
        )  # fmt: skip
        values = [
            self._json_column("approvals", name)
            for name in ("allowed_decisions", "input_preview", "event_refs")
        ]
        return (
            f"SELECT {columns}, {', '.join(values)} FROM approvals "
            "ORDER BY requested_at, approval_id"
        )

    def _approval(self, row: tuple[Any, ...]) -> Approval:
        approval, action, thread, run, call, tool, status, asked, resolved, checkpoint = row[:10]
        what = f"approval {approval!r}"
        self._names(what, approval, action, thread, run, tool, status, checkpoint or run)
        allowed, preview, events = [self._json(value, what) for value in row[10:]]
        if type(allowed) is not list or not all(type(one) is str for one in allowed):
            raise self._damaged(what, f"allows {allowed!r}")
        if type(events) is not list:
            raise self._damaged(what, f"has invalid events {events!r}")
        if status == PENDING and resolved is not None:
            raise self._damaged(what, "is both pending and resolved")
        decision = _DECISIONS.get(status, status)
        return Approval(
            approval, thread, run, action, str(call or ""), tool, status, tuple(allowed),
            decision if decision in allowed else None, self._time(asked, what),
            None if resolved is None else self._time(resolved, what), preview, checkpoint or None,
            tuple(events),
        )  # fmt: skip

    # --- requests and recovery intents ----------------------------------------------------------

    def _of_run(self, table: str, name: str) -> str:
        columns = self._columns(table, "thread_id", "run_id")
        value = self._json_column(table, name)
        return f"SELECT {columns}, {value} FROM {table} ORDER BY thread_id, run_id"

    def _request(self, row: tuple[Any, ...]) -> RunRequest:
        thread, run, text = row
        what = f"the request of run {run!r}"
        value = self._object(text, what, {"input", "savedAt"}, {"invocation"})
        saved = self._time(value["savedAt"], what)
        return RunRequest(
            run, thread, storable(value["input"]), storable(value.get("invocation")), saved
        )

    def _intent(self, row: tuple[Any, ...]) -> RecoveryIntent:
        thread, run, text = row
        what = f"the recovery intent of run {run!r}"
        needed = {"kind", "savedAt", "resumePayload", "attempts"}
        value = self._object(text, what, needed, {"checkpointRef"})
        checkpoint, attempts, kind = value.get("checkpointRef"), value["attempts"], value["kind"]
        if type(attempts) is not int or attempts < 0 or type(kind) is not str:
            raise self._damaged(what, f"is of kind {kind!r}, after {attempts!r} attempts")
        if checkpoint is not None and type(checkpoint) is not str:
            raise self._damaged(what, f"has checkpoint {checkpoint!r}")
        for value_given in (kind, checkpoint, attempts):
            # These columns cannot hold a text of JSON, as a payload can.
            if type(storable(value_given)) is dict:
                raise self._damaged(what, f"holds {value_given!r:.80}, which cannot be stored")
        payload, saved = storable(value["resumePayload"]), self._time(value["savedAt"], what)
        return RecoveryIntent(run, thread, kind, payload, checkpoint or None, attempts, saved)

    def _object(
        self, text: Any, what: str, needed: set[str], allowed: set[str]
    ) -> Mapping[str, Any]:
        value = self._json(text, what, whole=True)
        if type(value) is not dict or not needed <= value.keys() <= needed | allowed:
            raise self._damaged(what, f"does not hold {', '.join(sorted(needed))}, or more")
        return value

    # --- artifacts --------------------------------------------------------------------------------

    def _artifacts(self) -> str:
        columns = self._columns(
            "artifacts", "artifact_id", "thread_id", "run_id", "kind", "created_at"
        )
        path = self._column("artifacts", "path", "relative_path", "artifact_path")
        number = (
            "row_number() OVER (PARTITION BY thread_id, run_id ORDER BY created_at, artifact_id)"
        )
        order = "ORDER BY thread_id, run_id, created_at, artifact_id"
        return f"SELECT {columns}, {path}, {number} FROM artifacts {order}"

    def _artifact(self, row: tuple[Any, ...]) -> Made:
        artifact, thread, run, kind, created, path, number = row
        what = f"artifact {artifact!r} of run {run!r}"
        self._names(what, artifact, thread, run, kind)
        content, size_bytes = self._content(thread, run, path, what)
        is_blob = type(content) is bytes
        digest = Digest.of_blob(content) if is_blob else value_digest(content)
        time = self._time(created, what)
        made = Artifact(thread, run, artifact, kind, path, digest, is_blob, time, number)
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
            raise self._damaged(what, f"leads out of its directory: {exc}") from exc
        try:
            home = self._root.resolve(strict=True) / "threads" / thread / "runs" / run
            file = (home / path).resolve(strict=True)
        except (OSError, RuntimeError) as exc:
            raise NotFoundError(
                f"{what} has no file: {exc}; name the directory of threads/ with artifacts, or "
                "delete the row"
            ) from exc
        # Nothing on the way may be a link that leads elsewhere.
        if not file.is_relative_to(home) or not file.is_file():
            raise self._damaged(what, f"leads to {file}, which is not a file in its directory")
        return file

    # --- values ---------------------------------------------------------------------------------

    def _json(self, text: Any, what: str, *, whole: bool = False) -> Any:
        """A JSON value in its stored form, or None."""
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
            time_ms = utc_us(text) // 1000
        except ValueError as exc:
            raise self._damaged(what, f"has no time: {text!r}") from exc
        if time_ms < 0:
            raise self._damaged(what, f"is older than 1970: {text!r}")
        return time_ms

    def _damaged(self, what: str, reason: str) -> CorruptionError:
        return CorruptionError(
            f"{self._source.path}: {what} {reason}; correct or delete it there, and import again"
        )
