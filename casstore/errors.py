"""Every error casstore raises, grouped by what a caller would do about it.

Each class carries the exit code that the command line ends with. Messages name
the full digest or path and, where there is one, the next command to run; the
same facts are attributes, so that no handler needs to parse a message.
"""

from __future__ import annotations

from collections.abc import Sequence

PathStep = str | int


def render_path(path: Sequence[PathStep]) -> str:
    """Spell a place inside a value the way a reader would write it: ``$.messages[3].text``."""
    parts = ["$"]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif step.isidentifier():
            parts.append(f".{step}")
        else:
            parts.append(f"[{step!r}]")
    return "".join(parts)


class CasstoreError(Exception):
    """The root of all errors that casstore raises on purpose.

    >>> try:
    ...     casstore.open(place / "nowhere", create=False)
    ... except casstore.CasstoreError as exc:
    ...     type(exc).__name__
    'StoreNotFoundError'
    """

    exit_code = 70


class InvalidInputError(CasstoreError, ValueError):
    """The call itself is wrong: change its arguments."""

    exit_code = 3


class InvalidValueError(InvalidInputError):
    """A value cannot be stored canonically; ``path`` leads to the offending place."""

    def __init__(self, reason: str, path: Sequence[PathStep] = ()) -> None:
        super().__init__(reason, tuple(path))
        self.reason = reason
        self.path: tuple[PathStep, ...] = tuple(path)

    def __str__(self) -> str:
        return f"{self.reason} at {render_path(self.path)}"

    def within(self, step: PathStep) -> InvalidValueError:
        """The same error, seen from one container further out."""
        return type(self)(self.reason, (step, *self.path))


class LimitError(InvalidValueError):
    """A value, frame or answer is deeper, longer or larger than casstore handles at once."""

    def __str__(self) -> str:
        return super().__str__() if self.path else self.reason


class ExpansionError(LimitError):
    """A value repeats shared parts until it takes too much memory to build.

    ``put_value`` refuses such a value; ``Store.view`` reads parts of one that is stored.
    """


class BundleLimitError(LimitError):
    """A bundle asks for more than its reader was told to allow: a bomb, or raise the limit."""


class GraphError(InvalidInputError):
    """The nodes of a commit do not make a graph; ``node`` is the first at fault."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"node {node!r} {reason}")
        self.node = node


class DuplicateNodeError(GraphError):
    """Appending only creates: the id is taken, or appears twice in the commit."""


class UnknownParentError(GraphError):
    """The parent is neither in the session's graph nor in the commit, or it is hidden."""


class UnknownLeafError(GraphError):
    """The leaf asked for is neither in the session's graph nor in the commit, or it is hidden."""


class CycleError(GraphError):
    """Following parents from this node leads back to it."""


class SessionBindingError(InvalidInputError):
    """A commit, lease, claim or entry of one session was handed to another."""

    def __init__(self, bound: str, attempted: str) -> None:
        super().__init__(f"this is session {bound!r}, not {attempted!r}")
        self.bound = bound
        self.attempted = attempted


class SubjectSecretError(InvalidInputError):
    """The names of subjects in this store were hashed with another secret than the one given."""

    def __init__(self) -> None:
        super().__init__(
            "subjects in this store are hashed with another secret: with this one nobody would "
            "be found; give the one that it was begun with, or none if there was none"
        )


class SpawnDepthError(InvalidInputError):
    """A session would stand deeper below others than the log allows; it was not created."""

    def __init__(self, parent: str, depth: int, limit: int) -> None:
        super().__init__(
            f"spawn depth {depth} exceeds max {limit} for a session below {parent!r}: let the "
            "parent do the work, or open the log with a higher depth_limit"
        )
        self.parent = parent
        self.depth = depth
        self.limit = limit


class NotALogError(InvalidInputError):
    """A session is there, but it was not made by a log: its nodes are no numbered messages."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session!r} is no session log: {reason}")
        self.session = session


class NotCanonicalError(InvalidValueError):
    """Bytes decode to a value, but are not the one spelling that casstore accepts (P4)."""


class BadLineError(InvalidInputError):
    """A line of a source cannot be imported. ``committed`` is the last line that was, 0: none."""

    def __init__(self, line: int, reason: str, committed: int = 0) -> None:
        done = f"; lines up to {committed} are imported" if committed else "; nothing was imported"
        super().__init__(f"line {line}: {reason}{done}")
        self.line = line
        self.reason = reason
        self.committed = committed


class BadItemError(InvalidInputError):
    """An item of another store's memory cannot be moved; ``reason`` says why."""

    def __init__(self, namespace: str, key: str, reason: str) -> None:
        super().__init__(
            f"item {key!r} of namespace {namespace!r} cannot be moved: {reason}; correct or delete "
            "it where it is"
        )
        self.namespace = namespace
        self.key = key
        self.reason = reason


class DamagedSourceError(InvalidInputError):
    """Something in what is to be moved into a store cannot be read, or is not what it says."""

    def __init__(self, source: str, place: str, reason: str) -> None:
        super().__init__(f"{place} of {source} cannot be moved: {reason}")
        self.source = source
        self.place = place
        self.reason = reason


class StateRefusedError(InvalidInputError):
    """Scoped state may not be read or written so; ``reason`` is one of ``scoped.Reason``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoVectorIndexError(InvalidInputError):
    """Items cannot be found by meaning: there is no vector index."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, and there is no vector index: search by namespace and filter, or keep "
            "vectors in a database made for them"
        )


class DecisionNotAllowedError(InvalidInputError):
    """An approval is answered with one of the decisions that it allows; ``allowed`` has them."""

    def __init__(self, approval: str, decision: str, allowed: Sequence[str]) -> None:
        super().__init__(
            f"approval {approval!r} allows {', '.join(map(repr, allowed))}, not {decision!r}"
        )
        self.approval = approval
        self.decision = decision
        self.allowed: tuple[str, ...] = tuple(allowed)


class NotFoundError(CasstoreError, LookupError):
    """What was asked for is not in the store."""

    exit_code = 4


class ObjectNotFoundError(NotFoundError):
    """No object has this digest."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"no object {digest.hex()} in this store")
        self.digest = digest


class ObjectsMissingError(NotFoundError):
    """A thin file leaves out objects that this store does not have; ``digests`` names them."""

    def __init__(self, path: str, digests: Sequence[bytes]) -> None:
        named = ", ".join([digest.hex() for digest in digests[:3]])
        more = f" and {len(digests) - 3} more" if len(digests) > 3 else ""
        super().__init__(
            f"{path} leaves out what this store lacks: {named}{more}; "
            "export it again for this store, or whole"
        )
        self.path = path
        self.digests: tuple[bytes, ...] = tuple(digests)


class PathNotFoundError(NotFoundError):
    """A value has nothing at this path."""

    def __init__(self, path: Sequence[PathStep]) -> None:
        super().__init__(f"nothing at {render_path(path)}")
        self.path: tuple[PathStep, ...] = tuple(path)


class StoreNotFoundError(NotFoundError):
    """There is no store at this place, and the call does not create one."""


class SourceNotFoundError(StoreNotFoundError):
    """There is no file to read another store's content, or a transcript, from."""


class SessionNotFoundError(NotFoundError):
    """No session has this id."""

    def __init__(self, session: str) -> None:
        super().__init__(f"no session {session!r} in this store")
        self.session = session


class RevisionNotFoundError(NotFoundError):
    """The session has no such revision or label, or no longer."""

    def __init__(self, session: str, at: object) -> None:
        super().__init__(f"session {session!r} has nothing at {at!r}")
        self.session = session
        self.at = at


class NodeNotFoundError(NotFoundError):
    """The session's graph has no such node: never had, or it is hidden by a tombstone."""

    def __init__(self, session: str, node: str) -> None:
        super().__init__(f"session {session!r} has no node {node!r}")
        self.session = session
        self.node = node


class BranchNotFoundError(NotFoundError, ValueError):
    """The conversation has no such branch: never had, or it was deleted."""

    def __init__(self, branch: str) -> None:
        super().__init__(f"no branch {branch!r} in this conversation; branches() lists them")
        self.branch = branch


class ComponentNotFoundError(NotFoundError):
    """A component of a checkpoint is a link to something that is not stored."""

    def __init__(self, component: str, digest: bytes) -> None:
        super().__init__(f"{component} links to {digest.hex()}, which is not in this store")
        self.component = component
        self.digest = digest


class AttachmentNotFoundError(NotFoundError):
    """The session recorded no intent for this attachment."""

    def __init__(self, session: str, attachment: str) -> None:
        super().__init__(f"session {session!r} has no attachment {attachment!r}")
        self.session = session
        self.attachment = attachment


class RecordNotFoundError(NotFoundError):
    """There is no such record; ``kind`` says of what kind, ``name`` which."""

    def __init__(self, kind: str, name: str, place: str = "in this store") -> None:
        super().__init__(f"no {kind} {name!r} {place}")
        self.kind = kind
        self.name = name


class KeyMissingError(NotFoundError):
    """A value is encrypted, and its key is not in the key store that was given, or none was."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no key {key}: give the key store that has it, or restore that")
        self.key = key


class KeyDestroyedError(NotFoundError):
    """A value is encrypted, and its key was destroyed: the value is erased for good."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key} was destroyed: what it encrypts is erased, backups included")
        self.key = key


class ConflictError(CasstoreError):
    """Somebody else moved first: read again and retry."""

    exit_code = 5


class ConditionFailedError(ConflictError):
    """A condition of a write did not hold, so nothing was written.

    ``index`` is the position of the first failing condition in the write and
    ``actual`` the row as the engine found it (None if absent).
    """

    def __init__(self, index: int, condition: object, actual: bytes | None) -> None:
        super().__init__(f"condition {index} does not hold: {condition!r}; found {actual!r}")
        self.index = index
        self.condition = condition
        self.actual = actual


class ItemConflictError(ConflictError):
    """An item that is to be moved is in the store already, with other content."""

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


class LeaseLostError(ConflictError):
    """The lease is not the session's current one, or its time is up, or none was given."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"lease on session {session!r}: {reason}")
        self.session = session


class ClaimLostError(ConflictError):
    """Queued work is no longer held by this claim."""

    def __init__(self, session: str, batch: str) -> None:
        super().__init__(f"batch {batch!r} of session {session!r} is not held by this claim")
        self.session = session
        self.batch = batch


class AttachmentStateError(ConflictError):
    """The attachment is committed, or condemned, and does not allow this step."""

    def __init__(self, session: str, attachment: str, state: str) -> None:
        super().__init__(f"attachment {attachment!r} of session {session!r} is {state}")
        self.session = session
        self.attachment = attachment
        self.state = state


class RecordSealedError(ConflictError):
    """The record is sealed: nothing changes or removes it before somebody has reviewed that."""

    def __init__(self, record: str, action: str) -> None:
        super().__init__(f"{record} is sealed ({action}); lift_seal after a review")
        self.record = record
        self.action = action


class RecordHeldError(ConflictError):
    """The record must be kept for a time: it is neither changed nor removed before."""

    def __init__(self, record: str, basis: str, until_ms: int) -> None:
        super().__init__(
            f"{record} is held until {until_ms} ms since 1970 ({basis}); wait, or lift_hold "
            "after a review"
        )
        self.record = record
        self.basis = basis
        self.until_ms = until_ms


class SessionExistsError(ConflictError):
    """A session with this id is there already."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r} exists")
        self.session = session


class SessionDeletedError(ConflictError):
    """A session with this id was deleted; ids are not given twice."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r} was deleted; ids are not given twice")
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
    """The session is for another user than the one given."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r} is for another user; begin one of another name")
        self.session = session


class NameTakenError(ConflictError):
    """A tag or pin of this name points elsewhere, or a pin was to take the name of a tag."""

    def __init__(self, name: str, digest: bytes, *, is_tag: bool = False) -> None:
        kind = "tag" if is_tag else "pin"
        super().__init__(f"{name!r} is a {kind} of {digest.hex()} already")
        self.name = name
        self.digest = digest


class StateConflictError(ConflictError):
    """A key of scoped state is not at the version that the call expected; None: not there."""

    def __init__(self, key: str, expected: str | None, actual: str | None) -> None:
        super().__init__(
            f"state {key!r} is at version {actual}, not {expected}: read it again and decide anew"
        )
        self.key = key
        self.expected = expected
        self.actual = actual


class RunFrozenError(ConflictError):
    """A run of this id has begun, and what it may do was frozen otherwise then."""

    def __init__(self, run: str) -> None:
        super().__init__(
            f"run {run!r} has begun with another authorisation; end it first, or use another id"
        )
        self.run = run


class BranchedThreadError(ConflictError):
    """Somebody else has gone on from the checkpoint that a step of a thread builds on."""

    def __init__(self, thread: str, parent: str | None, head: str) -> None:
        super().__init__(
            f"thread {thread!r} has gone on to checkpoint {head}, and this step builds on "
            f"{parent}; read the thread again, or copy it to go your own way"
        )
        self.thread = thread
        self.parent = parent
        self.head = head


class CheckpointGoneError(ConflictError):
    """A checkpoint's delta channels need its parent, which was pruned or deleted meanwhile."""

    def __init__(self, thread: str, checkpoint: str) -> None:
        super().__init__(
            f"checkpoint {checkpoint} of thread {thread!r} is gone, and delta channels of a step "
            "that builds on it could not be read back; start again from the thread's latest"
        )
        self.thread = thread
        self.checkpoint = checkpoint


class SessionDivergedError(ConflictError):
    """Both sides have a session of this id, and neither is an earlier state of the other."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session!r} {reason}; bring it in under another name")
        self.session = session


class TargetExistsError(ConflictError):
    """A file or directory of this name is there, and the call was not told to replace it."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} exists; choose another name, or say that it may be replaced")
        self.path = path


class RecordConflictError(ConflictError):
    """A record of this name is there, and what it holds does not allow the call."""

    def __init__(self, kind: str, name: str, reason: str) -> None:
        super().__init__(f"{kind} {name!r} {reason}")
        self.kind = kind
        self.name = name


class ApprovalResolvedError(RecordConflictError):
    """Somebody has decided already; ``status`` says what became of it."""

    def __init__(self, approval: str, status: str) -> None:
        super().__init__("approval", approval, f"was resolved before: {status}")
        self.status = status


class StoreStateError(CasstoreError):
    """The store object cannot serve this call in its present state."""

    exit_code = 6


class ClosedError(StoreStateError):
    """The store was closed."""


class ReadOnlyError(StoreStateError):
    """The store was opened read-only."""


class ForkedError(StoreStateError):
    """The store was opened before a fork; the child must open it again."""


class BusyError(CasstoreError):
    """Another process uses the store in a way that excludes this one: wait, or stop it."""

    exit_code = 7


class ContendedError(BusyError):
    """Other writers were first in every attempt of a transaction: try again when fewer write.

    The transaction has written nothing.
    """

    def __init__(self, what: str, attempts: int, remedy: str) -> None:
        super().__init__(f"{what} kept changing during {attempts} attempts; {remedy}")
        self.what = what
        self.attempts = attempts


class CollectionOvertakenError(BusyError):
    """A collection could not keep up with what was written beside it: collect again.

    What it has removed so far is gone rightly, and nothing else.
    """


class CorruptionError(CasstoreError):
    """Stored bytes are not what was written: stop, and check the store."""

    exit_code = 8


class BundleError(CorruptionError):
    """A bundle is cut short, damaged or made up; ``offset`` is the byte from which on it fails."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path} fails at byte {offset}: {reason}; export or copy it again")
        self.path = path
        self.offset = offset
        self.reason = reason


class FormatError(CasstoreError):
    """The files are of another family or version than this release reads."""

    exit_code = 9


class ForeignStoreError(FormatError):
    """The environment was made by something else; it is left untouched."""


class ForeignSourceError(ForeignStoreError):
    """What is to be moved into a store is not of the program that it was said to be of."""


class SourceVersionError(ForeignSourceError):
    """What is to be moved into a store is of a version whose layout is not known here."""

    def __init__(self, place: str, found: int, supported: Sequence[int]) -> None:
        known = ", ".join(map(str, supported))
        super().__init__(
            f"{place} has schema version {found}, this release reads {known}: open it with a "
            "release that writes one of these, or upgrade casstore"
        )
        self.found = found
        self.supported = tuple(supported)


class ForeignBundleError(FormatError):
    """The file is no bundle, or of a kind or version that this release does not read."""


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
    """Records of a kind are of another family or version, or it cannot be told of which."""

    def __init__(self, place: str, found: str, expected: str) -> None:
        super().__init__(
            f"{place} holds {found}, this release reads {expected}: use the release that "
            "wrote it, or another store"
        )
        self.found = found
        self.expected = expected


class StorageError(CasstoreError):
    """The disk, the map or the permissions refused; nothing was half-written."""

    exit_code = 10


class StorageFullError(StorageError):
    """No room is left on the disk or in the map; the store stays usable."""


class AddressSpaceError(StorageError):
    """The process may not map the store's file: its limit on address space is below ``map_bytes``.

    Nothing was allocated: a map takes addresses, and neither memory nor disk before it is used.
    """


class StorageUnavailableError(StorageError):
    """The server that holds the store cannot be reached, or went away: try again later.

    Whether a write that ends like this has happened is not known. It happens at most once.
    """


class UnsafePayloadError(CasstoreError):
    """Serialised bytes name a type or codec that may not be loaded; nothing was run.

    ``name`` is what they name: allow it if it is yours, distrust the bytes if it is not.
    """

    exit_code = 11

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
