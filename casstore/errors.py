"""Every error that casstore raises, grouped by its remedy.

``exit_code`` is the code with which the command line exits. Messages contain the full digest or
path and, if there is one, the remedy. The same facts are attributes, so that no handler needs to
parse a message.

The errors of the extensions (record systems, workspaces, imports, adapters) are here as well: one
tree gives each error its place among the remedies and its exit code, and a handler of any error
imports one module, which loads nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

PathStep = str | int


def render_path(path: Sequence[PathStep]) -> str:
    """A path inside a value as text: ``$.messages[3].text``."""
    parts = ["$"]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif step.isidentifier():
            parts.append(f".{step}")
        else:
            parts.append(f"[{step!r}]")
    return "".join(parts)


def render_time(time_ms: int) -> str:
    """A time in milliseconds since 1970 as RFC 3339 in UTC: ``2026-11-18T14:03:22Z``."""
    from datetime import UTC, datetime

    try:
        found = datetime.fromtimestamp(time_ms // 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms since 1970"  # beyond the year 9999
    return found.strftime("%Y-%m-%dT%H:%M:%SZ")


class CasstoreError(Exception):
    """The base class of all errors that casstore raises.

    >>> try:
    ...     casstore.open(place / "nowhere", create=False)
    ... except casstore.CasstoreError as exc:
    ...     type(exc).__name__
    'StoreNotFoundError'
    """

    exit_code = 70


class InvalidInputError(CasstoreError, ValueError):
    """An argument of the call is invalid: change it."""

    exit_code = 3


class InvalidValueError(InvalidInputError):
    """A value has no canonical form; ``path`` leads to the offending part of it."""

    def __init__(self, reason: str, path: Sequence[PathStep] = ()) -> None:
        super().__init__(reason, tuple(path))
        self.reason = reason
        self.path: tuple[PathStep, ...] = tuple(path)

    def __str__(self) -> str:
        return f"{self.reason} at {render_path(self.path)}"

    def within(self, step: PathStep) -> InvalidValueError:
        """The same error with ``step`` before its path, for the enclosing container."""
        return type(self)(self.reason, (step, *self.path))


class LimitError(InvalidValueError):
    """A value, its stored form or a result exceeds a limit on depth, length or size."""

    def __str__(self) -> str:
        return super().__str__() if self.path else self.reason


class ExpansionError(LimitError):
    """A value repeats shared parts so often that building it would take too much memory.

    ``put_value`` refuses such a value; ``Store.view`` reads parts of one that is stored.
    """


class BundleLimitError(LimitError):
    """A bundle exceeds the limit that its reader set: distrust the bundle, or raise the limit."""


class GraphError(InvalidInputError):
    """The nodes of a commit do not form a valid graph; ``node`` is the first invalid one."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"node {node!r} {reason}")
        self.node = node


class DuplicateNodeError(GraphError):
    """The node id exists in the session, or appears twice in the commit."""


class UnknownParentError(GraphError):
    """The parent is neither in the session's graph nor in the commit, or it is hidden."""


class UnknownLeafError(GraphError):
    """The leaf is neither in the session's graph nor in the commit, or it is hidden."""


class CycleError(GraphError):
    """Following parents from this node leads back to it."""


class SessionBindingError(InvalidInputError):
    """A commit, lease, claim or entry of one session was passed to another session."""

    def __init__(self, bound: str, attempted: str) -> None:
        super().__init__(
            f"this is session {bound!r}, but the commit, lease, claim or entry passed to it is of "
            f"session {attempted!r}"
        )
        self.bound = bound
        self.attempted = attempted


class SubjectSecretError(InvalidInputError):
    """The subjects of this store were hashed with another secret than the one given."""

    def __init__(self) -> None:
        super().__init__(
            "subjects in this store are hashed with another secret, so this one would find none "
            "of them; pass the secret that the store was created with, or none if it has none"
        )


class SpawnDepthError(InvalidInputError):
    """A session would be nested deeper than the log allows; it was not created."""

    def __init__(self, parent: str, depth: int, limit: int) -> None:
        super().__init__(
            f"spawn depth {depth} exceeds max {limit} for a session below {parent!r}: let the "
            "parent do the work, or open the log with a higher depth_limit"
        )
        self.parent = parent
        self.depth = depth
        self.limit = limit


class NotALogError(InvalidInputError):
    """The session exists but is not a session log: its nodes are not numbered messages."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session!r} is not a session log: {reason}")
        self.session = session


class NotCanonicalError(InvalidValueError):
    """Bytes decode to a value, but are not its canonical encoding (P4)."""


class BadLineError(InvalidInputError):
    """A line cannot be imported. ``committed`` is the last line that was imported, 0 if none."""

    def __init__(self, line: int, reason: str, committed: int = 0) -> None:
        done = f"; lines up to {committed} are imported" if committed else "; nothing was imported"
        super().__init__(f"line {line}: {reason}{done}")
        self.line = line
        self.reason = reason
        self.committed = committed


class BadItemError(InvalidInputError):
    """An item of another program's memory store cannot be imported."""

    def __init__(self, namespace: str, key: str, reason: str) -> None:
        super().__init__(
            f"item {key!r} of namespace {namespace!r} cannot be moved: {reason}; correct or delete "
            "it where it is"
        )
        self.namespace = namespace
        self.key = key
        self.reason = reason


class DamagedSourceError(InvalidInputError):
    """A part of an import source cannot be read or is inconsistent."""

    def __init__(self, source: str, place: str, reason: str) -> None:
        super().__init__(f"{place} of {source} cannot be moved: {reason}")
        self.source = source
        self.place = place
        self.reason = reason


class StateRefusedError(InvalidInputError):
    """Access to scoped state is not allowed; ``reason`` names the rule that refuses it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoVectorIndexError(InvalidInputError):
    """``reindex`` was called on a memory store that was opened without ``index``."""

    def __init__(self) -> None:
        super().__init__("reindex needs an embedder: pass index={'dims': …, 'embed': …}")


class VectorIndexChangedError(InvalidInputError):
    """The vectors of the store are of another embedder, size or fields; ``reindex`` rebuilds them.

    ``stored`` and ``wanted`` describe the two indexes.
    """

    def __init__(self, stored: str, wanted: str) -> None:
        super().__init__(
            f"the vectors in this store are of {stored}, and index= asks for {wanted}; "
            "call reindex() to replace them, or pass the index that they are of"
        )
        self.stored = stored
        self.wanted = wanted


class UnsafeSnapshotError(InvalidInputError):
    """An object is not a valid workspace snapshot, or names a path outside its directory."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path!r} in the snapshot {reason}; do not trust where it came from")
        self.path = path
        self.reason = reason


class DecisionNotAllowedError(InvalidInputError):
    """The approval does not allow this decision; ``allowed`` lists the decisions it allows."""

    def __init__(self, approval: str, decision: str, allowed: Sequence[str]) -> None:
        super().__init__(
            f"approval {approval!r} allows {', '.join(map(repr, allowed))}, not {decision!r}"
        )
        self.approval = approval
        self.decision = decision
        self.allowed: tuple[str, ...] = tuple(allowed)


class NotFoundError(CasstoreError, LookupError):
    """The requested thing is not in the store."""

    exit_code = 4


class ObjectNotFoundError(NotFoundError):
    """No object has this digest."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"no object {digest.hex()} in this store")
        self.digest = digest


class ObjectsMissingError(NotFoundError):
    """A thin bundle omits objects that this store does not have; ``digests`` lists them."""

    def __init__(self, path: str, digests: Sequence[bytes]) -> None:
        named = ", ".join([digest.hex() for digest in digests[:3]])
        more = f" and {len(digests) - 3} more" if len(digests) > 3 else ""
        super().__init__(
            f"{path} omits objects that this store lacks: {named}{more}; "
            "export it again for this store, or export it without leaving objects out"
        )
        self.path = path
        self.digests: tuple[bytes, ...] = tuple(digests)


class PathNotFoundError(NotFoundError):
    """The value has no entry at this path."""

    def __init__(self, path: Sequence[PathStep]) -> None:
        super().__init__(f"nothing at {render_path(path)}")
        self.path: tuple[PathStep, ...] = tuple(path)


class StoreNotFoundError(NotFoundError):
    """There is no store at this path or address, and the call does not create one."""


class SourceNotFoundError(StoreNotFoundError):
    """The file or database to import from does not exist."""


class SessionNotFoundError(NotFoundError):
    """No session has this id."""

    def __init__(self, session: str) -> None:
        super().__init__(f"no session {session!r} in this store")
        self.session = session


class RevisionNotFoundError(NotFoundError):
    """The session has no such revision or label; it may have been removed."""

    def __init__(self, session: str, at: object) -> None:
        super().__init__(f"session {session!r} has nothing at {at!r}")
        self.session = session
        self.at = at


class NodeNotFoundError(NotFoundError):
    """The session's graph has no such node, or a tombstone hides it."""

    def __init__(self, session: str, node: str) -> None:
        super().__init__(f"session {session!r} has no node {node!r}")
        self.session = session
        self.node = node


class BranchNotFoundError(NotFoundError, ValueError):
    """The conversation has no such branch; it may have been deleted."""

    def __init__(self, branch: str) -> None:
        super().__init__(f"no branch {branch!r} in this conversation; branches() lists them")
        self.branch = branch


class ComponentNotFoundError(NotFoundError):
    """A component of a checkpoint links to an object that is not stored."""

    def __init__(self, component: str, digest: bytes) -> None:
        super().__init__(f"{component} links to {digest.hex()}, which is not in this store")
        self.component = component
        self.digest = digest


class SnapshotNotFoundError(NotFoundError):
    """A revision of a session has no files: no workspace was committed with it, or before it."""

    def __init__(self, session: str, at: object, component: str) -> None:
        where = "" if at is None else f" at {at!r}"
        super().__init__(
            f"session {session!r} has no component {component!r}{where}: "
            "no files were committed with it or before it"
        )
        self.session = session
        self.at = at
        self.component = component


class WorkspaceNotFoundError(NotFoundError):
    """There is no directory to take a snapshot of, or it was removed during the call."""

    def __init__(self, path: str) -> None:
        super().__init__(f"there is no directory {path}")
        self.path = path


class AttachmentNotFoundError(NotFoundError):
    """The session has no such attachment."""

    def __init__(self, session: str, attachment: str) -> None:
        super().__init__(f"session {session!r} has no attachment {attachment!r}")
        self.session = session
        self.attachment = attachment


class RecordNotFoundError(NotFoundError):
    """There is no record of this ``kind`` and ``name``."""

    def __init__(self, kind: str, name: str, place: str = "in this store") -> None:
        super().__init__(f"no {kind} {name!r} {place}")
        self.kind = kind
        self.name = name


class KeyMissingError(NotFoundError):
    """A value is encrypted, and its key is not in the key store, or no key store was given."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no key {key}: pass the key store that has it, or restore that key store")
        self.key = key


class KeyDestroyedError(NotFoundError):
    """A value is encrypted, and its key was destroyed: the value is erased permanently."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key} was destroyed: its values are erased, in backups too")
        self.key = key


class ConflictError(CasstoreError):
    """Another writer was first, or something is in the way, such as a lease: read again, retry."""

    exit_code = 5


class ConditionFailedError(ConflictError):
    """A condition of a write did not hold, so nothing was written.

    ``index`` is the position of the first condition that failed, ``actual`` the value of its row
    (None if there is no row).
    """

    def __init__(self, index: int, condition: object, actual: bytes | None) -> None:
        super().__init__(f"condition {index} does not hold: {condition!r}; found {actual!r}")
        self.index = index
        self.condition = condition
        self.actual = actual


class ItemConflictError(ConflictError):
    """An item to be imported is already in the store, with other content."""

    def __init__(self, namespace: str, key: str, what: str) -> None:
        super().__init__(
            f"item {key!r} of namespace {namespace!r} is in the store with another {what}: "
            "replace it, or import into another store"
        )
        self.namespace = namespace
        self.key = key
        self.what = what


class HeadConflictError(ConflictError):
    """The session's head is not at the revision that the commit expected."""

    def __init__(self, session: str, expected: int, actual: int) -> None:
        super().__init__(f"session {session!r} is at revision {actual}, not {expected}")
        self.session = session
        self.expected = expected
        self.actual = actual


class TurnConflictError(ConflictError):
    """The turn was committed before, with other content."""

    def __init__(self, session: str, turn: str) -> None:
        super().__init__(f"turn {turn!r} of session {session!r} was committed with other content")
        self.session = session
        self.turn = turn


class LeaseHeldError(ConflictError):
    """The session is leased, and the call came without its lease: wait, or pass the lease."""

    def __init__(self, session: str, owner: str, expires_at_ms: int) -> None:
        super().__init__(
            f"session {session!r} is leased by {owner!r} until {render_time(expires_at_ms)}; "
            "wait, or pass its lease"
        )
        self.session = session
        self.owner = owner
        self.expires_at_ms = expires_at_ms


class LeaseLostError(ConflictError):
    """The lease is not the session's current one, or it expired or was released."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"lease on session {session!r}: {reason}")
        self.session = session
        self.reason = reason


class ClaimLostError(ConflictError):
    """The claim on queued work has expired or was taken over."""

    def __init__(self, session: str, batch: str) -> None:
        super().__init__(f"batch {batch!r} of session {session!r} is not held by this claim")
        self.session = session
        self.batch = batch


class AttachmentStateError(ConflictError):
    """The state of the attachment (committed, condemned) does not allow this step."""

    def __init__(self, session: str, attachment: str, state: str) -> None:
        super().__init__(
            f"attachment {attachment!r} of session {session!r} is {state}, which does not allow "
            "this call"
        )
        self.session = session
        self.attachment = attachment
        self.state = state


class RecordSealedError(ConflictError):
    """The record is sealed: it cannot be changed or deleted until a review lifts the seal."""

    def __init__(self, record: str, action: str) -> None:
        super().__init__(f"{record} is sealed ({action}); lift_seal after a review")
        self.record = record
        self.action = action


class RecordHeldError(ConflictError):
    """The record is on hold: it cannot be changed or deleted until the hold ends."""

    def __init__(self, record: str, basis: str, until_ms: int) -> None:
        super().__init__(
            f"{record} is held until {until_ms} ms since 1970 ({basis}); wait, or lift_hold "
            "after a review"
        )
        self.record = record
        self.basis = basis
        self.until_ms = until_ms


class SessionExistsError(ConflictError):
    """A session with this id exists."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r} exists already; choose another id")
        self.session = session


class SessionDeletedError(ConflictError):
    """A session with this id was deleted; ids are never reused."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r} was deleted; ids are never reused")
        self.session = session


class PendingCallsError(ConflictError):
    """Tool calls of a message have no results yet: resume them, or abort them."""

    def __init__(self, session: str, number: int, calls: Sequence[object]) -> None:
        super().__init__(
            f"message {number} of session {session!r} waits for the results of {len(calls)} tool "
            "calls: resume them, or abort them"
        )
        self.session = session
        self.number = number
        self.calls = tuple(calls)


class SessionUserError(ConflictError):
    """The session belongs to another user than the one given."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r} belongs to another user; use another session id")
        self.session = session


class NameTakenError(ConflictError):
    """A tag or pin of this name keeps another object, or a pin would take the name of a tag."""

    def __init__(self, name: str, digest: bytes, *, is_tag: bool = False) -> None:
        kind = "tag" if is_tag else "pin"
        super().__init__(f"{name!r} is already a {kind} of {digest.hex()}")
        self.name = name
        self.digest = digest


class StateConflictError(ConflictError):
    """A key of scoped state is not at the expected version; None: the key does not exist."""

    def __init__(self, key: str, expected: str | None, actual: str | None) -> None:
        super().__init__(
            f"state {key!r} is at version {actual}, not {expected}: read it again and retry"
        )
        self.key = key
        self.expected = expected
        self.actual = actual


class RunFrozenError(ConflictError):
    """A run with this id has begun with another authorisation, which is frozen."""

    def __init__(self, run: str) -> None:
        super().__init__(
            f"run {run!r} has begun with another authorisation; end it first, or use another id"
        )
        self.run = run


class BranchedThreadError(ConflictError):
    """Another step was already based on the checkpoint that this step is based on."""

    def __init__(self, thread: str, parent: str | None, head: str) -> None:
        super().__init__(
            f"thread {thread!r} is at checkpoint {head}, but this step is based on "
            f"{parent}; read the thread again, or copy the thread to branch off"
        )
        self.thread = thread
        self.parent = parent
        self.head = head


class CheckpointGoneError(ConflictError):
    """A checkpoint's delta channels need its parent, which has been pruned or deleted."""

    def __init__(self, thread: str, checkpoint: str) -> None:
        super().__init__(
            f"checkpoint {checkpoint} of thread {thread!r} was deleted, so the delta channels of "
            "a step based on it could not be read; start again from the thread's latest checkpoint"
        )
        self.thread = thread
        self.checkpoint = checkpoint


class SessionDivergedError(ConflictError):
    """Source and target have a session of this id, and neither is an earlier state of the other."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session!r} {reason}; import it under another id")
        self.session = session


class TargetExistsError(ConflictError):
    """The target file or directory exists, and the call does not replace it."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} exists; choose another name, or allow replacing it")
        self.path = path


class RecordConflictError(ConflictError):
    """A record with this name exists, and its content does not allow the call."""

    def __init__(self, kind: str, name: str, reason: str) -> None:
        super().__init__(f"{kind} {name!r} {reason}")
        self.kind = kind
        self.name = name


class ApprovalResolvedError(RecordConflictError):
    """The approval is already resolved; ``status`` is the outcome."""

    def __init__(self, approval: str, status: str) -> None:
        super().__init__("approval", approval, f"was resolved before: {status}")
        self.status = status


class RestoreConflictError(ConflictError):
    """Files differ from every snapshot that could give them back; none was touched.

    ``conflicts`` has each path with the reason. Commit the workspace, or restore with ``force``,
    which takes a snapshot first.
    """

    def __init__(self, conflicts: Sequence[tuple[str, str]]) -> None:
        named = "; ".join([f"{path}: {reason}" for path, reason in conflicts[:3]])
        more = f"; and {len(conflicts) - 3} more" if len(conflicts) > 3 else ""
        super().__init__(
            f"restoring would lose changes: {named}{more}. Take a snapshot, or restore with force"
        )
        self.conflicts: tuple[tuple[str, str], ...] = tuple(conflicts)


class StoreStateError(CasstoreError):
    """The state of the store object does not allow this call."""

    exit_code = 6


class ClosedError(StoreStateError):
    """The store was closed."""


class ReadOnlyError(StoreStateError):
    """The store was opened read-only."""


class ForkedError(StoreStateError):
    """The store was opened before this process was forked: open it again in this process."""


class BusyError(CasstoreError):
    """Another process or thread uses the store exclusively: wait, or stop it."""

    exit_code = 7


class ContendedError(BusyError):
    """Every attempt of a transaction conflicted with another writer: retry when fewer write.

    Nothing was written.
    """

    def __init__(self, what: str, attempts: int, remedy: str) -> None:
        super().__init__(f"{what} kept changing during {attempts} attempts; {remedy}")
        self.what = what
        self.attempts = attempts


class CollectionOvertakenError(BusyError):
    """A collection could not keep up with concurrent writers: collect again.

    The objects that it removed before were unreachable; removing them was right.
    """


class CorruptionError(CasstoreError):
    """Stored bytes differ from what was written: stop, and check the store."""

    exit_code = 8


class BundleError(CorruptionError):
    """A bundle is truncated, damaged or forged; ``offset`` is the position of the first fault."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path} is invalid at byte {offset}: {reason}; export or copy it again")
        self.path = path
        self.offset = offset
        self.reason = reason


class FormatError(CasstoreError):
    """The files are of another program, or of a version that this release does not read."""

    exit_code = 9


class ForeignStoreError(FormatError):
    """The directory or schema was not created by casstore; it is left unchanged."""


class ForeignSourceError(ForeignStoreError):
    """The import source does not belong to the program that the call names."""


class SourceVersionError(ForeignSourceError):
    """The import source has a schema version that this release does not read."""

    def __init__(self, place: str, found: int, supported: Sequence[int]) -> None:
        known = ", ".join(map(str, supported))
        super().__init__(
            f"{place} has schema version {found}, this release reads {known}: open it with a "
            "release that writes one of these, or upgrade casstore"
        )
        self.found = found
        self.supported = tuple(supported)


class ForeignBundleError(FormatError):
    """The file is not a bundle, or has a kind or version that this release does not read."""


class FormatVersionError(FormatError):
    """The store has a format version that this release does not read."""

    def __init__(self, place: str, found: int, supported: int) -> None:
        older = "read it with the release that wrote it, and export what you need"
        newer = "upgrade casstore" if found > supported else older
        super().__init__(
            f"{place} has store format {found}, this release reads format {supported}: {newer}"
        )
        self.found = found
        self.supported = supported


class RecordsSchemaError(FormatError):
    """The rows of a record system have a schema that this release does not read."""

    def __init__(self, place: str, found: str, expected: str) -> None:
        super().__init__(
            f"{place} holds {found}, this release reads {expected}: use the release that "
            "wrote it, or another store"
        )
        self.found = found
        self.expected = expected


class StorageError(CasstoreError):
    """The disk, the memory map or the permissions do not allow the operation.

    No partial write remains.
    """

    exit_code = 10


class StorageFullError(StorageError):
    """The disk is full, or the file has reached ``map_bytes``; the store stays usable."""


class UnreadablePathError(StorageError):
    """A file or directory of a workspace cannot be read; no snapshot was taken."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"cannot read {path}: {reason}; correct its permissions, ignore it, or pass "
            "skip_unreadable=True (--skip-unreadable) to leave it out by name"
        )
        self.path = path
        self.reason = reason


class AddressSpaceError(StorageError):
    """The process cannot map the store's file: its address space limit is below ``map_bytes``.

    A map reserves addresses only; it takes memory and disk space when it is used.
    """


class StorageUnavailableError(StorageError):
    """The server that holds the store cannot be reached: retry later.

    A write that ends with this error may have happened; it happens at most once.
    """


class UnsafePayloadError(CasstoreError):
    """Serialised bytes refer to a type or codec that must not be loaded; no code was run.

    ``name`` is the type or codec: allow it if it is yours, else distrust the bytes.
    """

    exit_code = 11

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
