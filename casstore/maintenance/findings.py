"""What a check can find: codes, how severe each is, and what to do about it.

``CODES`` has the codes of the core. Record systems add codes of their own (``systems``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from casstore.engine import faults
from casstore.engine.faults import Fault
from casstore.errors import InvalidInputError
from casstore.format.digest import DIGEST_BYTES, Digest

INFO: Final = "info"
WARNING: Final = "warning"
ERROR: Final = "error"

OBJECT_MISSING: Final = "object_missing"
OBJECT_MALFORMED: Final = "object_malformed"
VALUE_EXPANDS: Final = "value_expands"
LINK_ORDER: Final = "link_order"
LINKS_DIFFER: Final = "links_differ"
ROOT_MISSING: Final = "root_missing"
ROW_MALFORMED: Final = "row_malformed"
NODE_INDEX_WRONG: Final = "node_index_wrong"
GRAPH_WRONG: Final = "graph_wrong"
LABEL_DANGLING: Final = "label_dangling"
HISTORY_GAP: Final = "history_gap"
HISTORY_WRONG: Final = "history_wrong"
HEAD_MISSING: Final = "head_missing"
DELETION_UNFINISHED: Final = "deletion_unfinished"
QUEUE_WRONG: Final = "queue_wrong"
PROTECTION_DANGLING: Final = "protection_dangling"
SUBJECTS_WRONG: Final = "subjects_wrong"
RECORD_COUNT_WRONG: Final = "record_count_wrong"
RECORD_INDEX_WRONG: Final = "record_index_wrong"
RECORD_ORPHANED: Final = "record_orphaned"
RECORDS_UNCHECKED: Final = "records_unchecked"

_SALVAGE: Final = "close the store and salvage it into a new one"
_REBUILD: Final = "rebuild"
#: The remedy of findings that the store's own operations leave behind.
NOTHING: Final = "none is needed"
RESTORE: Final = "compare with a backup, and restore what is missing"


class Meaning(NamedTuple):
    """How severe findings of a code are, what they mean, and the remedy."""

    severity: str
    meaning: str
    remedy: str


#: The codes of the core.
CODES: Final[dict[str, Meaning]] = {
    faults.HEADER_DAMAGED: Meaning(
        ERROR, "a row about the store as a whole is missing or cannot be decoded", _SALVAGE
    ),
    faults.PAGE_DAMAGED: Meaning(
        ERROR, "a page of the data file is not what LMDB wrote; its table was not read", _SALVAGE
    ),
    faults.SLAB_DAMAGED: Meaning(
        ERROR, "the directory of a slab does not match its checksum: its objects are lost", _SALVAGE
    ),
    faults.SLABS_OVERLAP: Meaning(
        ERROR, "two slabs claim the same ids", _SALVAGE
    ),
    faults.DICTIONARY_DAMAGED: Meaning(
        ERROR, "a compression dictionary is damaged: slabs that name it are lost", _SALVAGE
    ),
    faults.INDEX_DANGLING: Meaning(
        ERROR, "the index points to a place that holds no object, or another object", _REBUILD
    ),
    OBJECT_MISSING: Meaning(
        ERROR, "an object links to one that the index does not name",
        f"{_REBUILD}, which finds it if its bytes are still in a slab; else {_SALVAGE}",
    ),
    faults.OBJECT_DAMAGED: Meaning(
        ERROR, "an object's bytes do not match its digest, or cannot be inflated", _SALVAGE
    ),
    OBJECT_MALFORMED: Meaning(
        ERROR, "an object matches its digest but is not in the canonical form of its kind",
        "nothing was lost since it was written; find out who wrote it, and drop what refers to it",
    ),
    VALUE_EXPANDS: Meaning(
        WARNING, "shared parts of a value repeat so often that it cannot be read whole",
        "read parts of it with Store.view; no casstore of this release would have stored it, so "
        "find out where it came from",
    ),
    LINK_ORDER: Meaning(
        ERROR, "an object's id is lower than that of one it links to", _SALVAGE
    ),
    LINKS_DIFFER: Meaning(
        ERROR, "the directory of a slab lists other links than the object has", _SALVAGE
    ),
    ROOT_MISSING: Meaning(
        ERROR, "a row names an object that the index does not",
        f"{_REBUILD}, which finds it if its bytes are still in a slab; else {_SALVAGE}",
    ),
    faults.ROW_DAMAGED: Meaning(
        ERROR, "a row does not match its checksum",
        _SALVAGE,
    ),
    ROW_MALFORMED: Meaning(
        ERROR, "a row matches its checksum but cannot be decoded",
        f"{_SALVAGE}; a newer release may have written it",
    ),
    faults.ROWS_SUM_WRONG: Meaning(
        ERROR, "each row is in order, but they are not those last written: some are older or gone",
        "find out what became of the newest commits, and restore a backup if they matter; "
        f"{_REBUILD} accepts the rows as they are",
    ),
    NODE_INDEX_WRONG: Meaning(
        ERROR, "the node index of a revision lists other nodes than its graph has",
        "nothing was lost since it was written; find out who wrote it, and replace the graph",
    ),
    GRAPH_WRONG: Meaning(
        ERROR, "the nodes of a revision cannot be read, or make no graph",
        f"{_SALVAGE}, which rebuilds damaged parts of node indexes",
    ),
    LABEL_DANGLING: Meaning(
        WARNING, "a label names a revision that is not there", "remove the label, or move it"
    ),
    HISTORY_GAP: Meaning(
        INFO, "revisions are missing between two that are there, as retention leaves it",
        NOTHING,
    ),
    HISTORY_WRONG: Meaning(
        ERROR, "a history row is of another revision than its key says, or not below the head's",
        _SALVAGE,
    ),
    HEAD_MISSING: Meaning(
        ERROR, "a session has earlier revisions but no head, and was not deleted", _SALVAGE
    ),
    DELETION_UNFINISHED: Meaning(
        INFO, "a deleted session still has rows: its deletion was cut short",
        "delete it again, which removes them",
    ),
    QUEUE_WRONG: Meaning(
        WARNING, "a batch of a queue and the rows that find it do not agree",
        "cancel the batch, or enqueue it again",
    ),
    PROTECTION_DANGLING: Meaning(
        WARNING, "a protection is of a revision that is not there",
        "ask the holder of the protection what is lost, then end the protection: unprotect",
    ),
    SUBJECTS_WRONG: Meaning(
        ERROR, "a session and the index of subjects do not agree whom it is about: erasing a "
        "subject may overlook it",
        "add the subject to the session and remove it, or the other way round: both are written",
    ),
    RECORD_COUNT_WRONG: Meaning(
        ERROR, "a record's count of what belongs to it differs from what is stored", RESTORE
    ),
    RECORD_INDEX_WRONG: Meaning(
        ERROR, "a record and the rows that find it do not agree: it may be overlooked, also when "
        "it is to be erased",
        RESTORE,
    ),
    RECORD_ORPHANED: Meaning(
        ERROR, "a record belongs to another that is not there", RESTORE
    ),
    RECORDS_UNCHECKED: Meaning(
        INFO, "records are of a system that is not installed, or of a table that it does not know: "
        "they are kept, and what they say was not checked",
        "install the package that registers the system, or a newer one, and check again",
    ),
}  # fmt: skip


class Where(NamedTuple):
    """What a finding is about; None for all that does not apply."""

    session: str | None = None
    revision: int | None = None
    digest: Digest | None = None
    table: str | None = None
    key: bytes | None = None

    def __str__(self) -> str:
        parts = [
            f"session {self.session!r}" if self.session is not None else "",
            f"revision {self.revision}" if self.revision is not None else "",
            f"object {self.digest}" if self.digest is not None else "",
            f"table {self.table}" if self.table is not None else "",
            f"key {self.key.hex()}" if self.key is not None else "",
        ]
        return ", ".join([part for part in parts if part])


#: A finding about the store as a whole.
NOWHERE: Final = Where()


class Finding(NamedTuple):
    """One thing that a check found.

    Attributes:
        code: what kind of finding it is, one of a fixed list
        severity: error, warning or info
        where: the session, revision, object or row
        what: what is wrong here
        meaning: what the code means
        remedy: what to do about it
    """

    code: str
    severity: str
    where: Where
    what: str
    meaning: str
    remedy: str

    def __str__(self) -> str:
        place = str(self.where)
        return f"{self.severity} {self.code}{f' at {place}' if place else ''}: {self.what}"


class Affected(NamedTuple):
    """A session that needs objects that are damaged or missing.

    Attributes:
        session: the session
        revisions: the newest revisions that need such objects
        revision_count: how many revisions need them
        head: true: its present state needs them
        others: queued batches and attachments that need them
    """

    session: str
    revisions: tuple[int, ...]
    revision_count: int
    head: bool
    others: tuple[str, ...] = ()


class Findings:
    """Collects findings up to a number, and counts the rest.

    Half of the limit is reserved for errors: harmless findings must not crowd them out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._codes = dict(CODES)
        self._kept: list[Finding] = []
        self._mild = 0
        self.omitted = 0
        self.counts: dict[str, int] = {}

    def add_codes(self, codes: Mapping[str, Meaning]) -> None:
        """Accept findings of these codes as well, except where the core has the same code."""
        self._codes = {**codes, **self._codes}

    def add(self, code: str, what: str, where: Where = NOWHERE) -> None:
        """Record a finding."""
        meaning = self._codes.get(code)
        if meaning is None:
            raise InvalidInputError(
                f"unknown code of a finding, {code!r}: a record system must list it in codes"
            )
        self.counts[code] = self.counts.get(code, 0) + 1
        mild = meaning.severity != ERROR
        if len(self._kept) >= self._limit or (mild and self._mild >= max(1, self._limit // 2)):
            self.omitted += 1
            return
        self._mild += mild
        self._kept.append(Finding(code, meaning.severity, where, what, *meaning[1:]))

    def add_fault(self, fault: Fault, session: str | None) -> None:
        """Record a fault that an engine has found, in an object or in a row of a session."""
        known = fault.digest is not None and len(fault.digest) == DIGEST_BYTES
        digest = Digest(fault.digest or b"") if known else None
        where = Where(session, None, digest, fault.table, fault.key)
        self.add(fault.code, fault.what, where)

    def found(self) -> tuple[Finding, ...]:
        """The findings that were kept, in the order in which they were found."""
        return tuple(self._kept)

    def has(self, severity: str) -> bool:
        """Whether anything of this severity was found, kept or not."""
        return any(self._codes[code].severity == severity for code in self.counts)

    @property
    def harmless(self) -> int:
        """How many findings need no remedy, kept or not."""
        return sum(
            [count for code, count in self.counts.items() if self._codes[code].remedy == NOTHING]
        )
