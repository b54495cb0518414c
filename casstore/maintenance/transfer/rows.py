"""The rows of a session: their tables, how a store is read for them, how a bundle encodes them.

A bundle's rows leave out what has a meaning in one store only:

    session      [id]
    meta         [fields of SessionMeta but the id, as a map]
    revision     [revision, created at, committed at, manifest, operation, turn, hidden,
                  rewound to, origin, adopted]
    label        [name, revision]
    attachment   [id, uri, digest, owner, intent at, committed at]
    receipt      [turn, version, content hash, revision, first position, number of nodes], and if
                 nodes of the turn were removed since: [[position, id] …], leaf or nil

In this order; revisions ascend, and the last one is the head. A bundle leaves out leases and queued
work, which belong to the store where the work is done, and attachments that are only announced or
condemned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import Engine, PutRow
from casstore.errors import ForeignBundleError, InvalidInputError
from casstore.format.digest import DIGEST_BYTES, Digest
from casstore.session import attachments, catalogue, keys
from casstore.session.attachments import COMMITTED, Attachments
from casstore.session.data import Attachment, Entry, Origin, SessionMeta
from casstore.session.scanning import scan
from casstore.session.state import (
    OPERATIONS,
    HeadRow,
    Runtime,
    State,
    decode_head,
    meta_key,
    put_label,
)
from casstore.session.turns import Receipt, decode_receipt, put_receipt

#: Tables that are keyed by session and carried session by session.
OF_SESSIONS: Final = (
    "heads",
    "sessions",
    "tombstones",
    "history",
    "queue",
    "attachments",
    "receipts",
    "leases",
)
#: Tables that are carried row by row. Rows of ``retention`` may belong to a session, too.
OF_THE_STORE: Final = ("pins", "records", "retention")
#: Every table of an engine: a copy loses the rows of a table that is missing here.
CARRIED: Final = (*OF_SESSIONS, *OF_THE_STORE)

_MAX_TIME: Final = (1 << 63) - 1
_MAX_VERSION: Final = 255
_REVISION_BYTES: Final = 8


def owner(table: str, key: bytes) -> bytes | None:
    """The key of the session that a row belongs to; None if it belongs to none."""
    if table == "retention":
        try:
            return keys.retention_session(key)
        except InvalidInputError:
            # A kind of row that this release does not know.
            return None
    return keys.session_part(key) if table in OF_SESSIONS else None


class SessionRows(NamedTuple):
    """A session without its objects."""

    session: str
    meta: SessionMeta | None
    #: Ascending.
    revisions: Sequence[HeadRow]
    labels: dict[str, int]
    attachments: Sequence[Attachment]
    #: By turn. A bundle leaves out their manifests, which are those of their revisions.
    receipts: dict[str, Receipt]

    def named(self) -> Iterator[bytes]:
        """The digests that these rows keep alive, the oldest revision's first."""
        for row in self.revisions:
            yield row.manifest
            if row.hidden is not None:
                yield row.hidden
        for one in self.attachments:
            if one.digest is not None:
                yield bytes(one.digest)

    def renamed(self, name: str | None) -> SessionRows:
        """The rows under another id, without receipts: their content hashes include the old id."""
        if name is None or name == self.session:
            return self
        meta = None if self.meta is None else self.meta._replace(session=name)
        moved = [one._replace(session=name) for one in self.attachments]
        return self._replace(session=name, meta=meta, attachments=moved, receipts={})

    def stored_revisions(self) -> list[HeadRow]:
        """The revisions as a store holds them: with the session's id if that is cut in keys."""
        long_id = self.session if keys.is_cut(self.session) else None
        return [row._replace(long_id=long_id) for row in self.revisions]

    def stored_labels(self) -> list[PutRow]:
        """The labels as a store holds them."""
        key = keys.session_key(self.session)
        return [put_label(key, *label) for label in self.labels.items()]

    def stored_others(self, revisions: Iterable[HeadRow]) -> list[PutRow]:
        """Meta and attachments as a store holds them, and the receipts of these revisions."""
        key = keys.session_key(self.session)
        manifests = {row.revision: row.manifest for row in revisions}
        return [
            *([] if self.meta is None else [catalogue.put_meta(self.meta)]),
            *[attachments.put_as_is(one) for one in self.attachments],
            *[
                put_receipt(key, turn, receipt._replace(manifest=manifests[receipt.revision]))
                for turn, receipt in self.receipts.items()
                if receipt.revision in manifests
            ],
        ]


# --- reading a store --------------------------------------------------------------------------


def read_session(
    runtime: Runtime, session: str, at: int | str | Entry | None, *, history: bool
) -> tuple[SessionRows, State]:
    """The rows of a session, and the state that it is read at.

    Without ``history`` it is one revision alone. The head is read first: earlier revisions do not
    change.
    """
    current = runtime.get(session)
    key = keys.session_key(session)
    state = current if at is None else runtime.at(session, at)
    past = revision_rows(runtime.engine, key, 0, current.head.revision) if history else ()
    # The head's hidden nodes are hidden in every revision.
    revisions = [decode_head(row.value) for row in past]
    revisions.append(state.head._replace(hidden=current.head.hidden))
    known = {row.revision for row in revisions}
    labels = {
        row.value[_REVISION_BYTES:].decode(): label_revision(row.value)
        for row in label_rows(runtime.engine, key)
        if label_revision(row.value) in known
    }
    has_meta = runtime.rows(session, [meta_key(key)])[1] is not None
    rows = SessionRows(
        session,
        catalogue.find_meta(runtime, session) if has_meta else None,
        revisions,
        labels,
        Attachments(runtime, session).list(state=COMMITTED),
        _receipts(runtime.engine, key, revisions) if history else {},
    )
    return rows, state


def revision_rows(engine: Engine, key: bytes, first: int, head: int) -> Iterator[PutRow]:
    """The rows of a session's revisions from ``first`` to before the head."""
    return _rows(engine, "history", keys.history(key, first), keys.history(key, head))


def label_rows(engine: Engine, key: bytes) -> Iterator[PutRow]:
    """The rows of a session's labels."""
    return _rows(engine, "history", keys.labels(key), keys.past(key))


def label_revision(value: bytes) -> int:
    """The revision that the row of a label names."""
    return int.from_bytes(value[:_REVISION_BYTES], "big")


def receipt_rows(engine: Engine, key: bytes) -> Iterator[PutRow]:
    """The rows of the receipts of a session's turns."""
    return _rows(engine, "receipts", key, keys.past(key))


def _rows(engine: Engine, table: str, start: bytes, stop: bytes) -> Iterator[PutRow]:
    for row in scan(engine, table, start, stop):
        yield PutRow(table, *row)


def _receipts(engine: Engine, key: bytes, revisions: Sequence[HeadRow]) -> dict[str, Receipt]:
    """The receipts of the turns that these revisions were committed by."""
    turns = {row.revision: row.turn for row in revisions if row.turn is not None}
    found: dict[str, Receipt] = {}
    for row in receipt_rows(engine, key):
        receipt = decode_receipt(row.value)
        turn = turns.get(receipt.revision)
        # A bundle carries no settled receipt: its revision is gone.
        if turn is None or not isinstance(receipt, Receipt):
            continue
        if row.key == key + keys.part(turn, "a turn id"):
            found[turn] = receipt
    return found


def ordered_names(runtime: Runtime, state: State, named: Iterable[bytes]) -> Iterator[bytes]:
    """The nodes of a state, the oldest first, and then ``named``: so walks from each are short."""
    for place in runtime.index(state.manifest).places():
        yield place.digest
    yield from named


# --- the rows of a bundle -----------------------------------------------------------------------


def encode(rows: SessionRows) -> Iterator[list[Any]]:
    """Encode the rows one by one."""
    yield ["session", rows.session]
    if rows.meta is not None:
        fields = rows.meta._asdict()
        del fields["session"]
        yield ["meta", fields]
    for row in rows.revisions:
        yield [
            "revision",
            row.revision,
            row.created_at_ms,
            row.committed_at_ms,
            row.manifest,
            row.operation,
            row.turn,
            row.hidden,
            row.rewound_to,
            None if row.origin is None else list(row.origin),
            None if row.adopted is None else list(row.adopted),
        ]
    for name, revision in rows.labels.items():
        yield ["label", name, revision]
    for one in rows.attachments:
        digest = None if one.digest is None else bytes(one.digest)
        yield [
            "attachment", one.id, one.uri, digest, one.owner, one.intent_at_ms, one.committed_at_ms,
        ]  # fmt: skip
    for turn, receipt in rows.receipts.items():
        receipt_row = [
            "receipt", turn, receipt.version, receipt.content_hash, receipt.revision,
            receipt.first, receipt.node_count,
        ]  # fmt: skip
        if receipt.removed or receipt.leaf is not None:
            receipt_row += [[list(each) for each in receipt.removed], receipt.leaf]
        yield receipt_row


def decode(rows: Iterable[list[Any]]) -> SessionRows:
    """Read the rows of a bundle; InvalidInputError if they are not those of one session."""
    found: dict[str, list[list[Any]]] = {kind: [] for kind in _FIELDS}
    last = -1
    for kind, *fields in rows:
        if kind not in _FIELDS:
            raise InvalidInputError(f"a row of an unknown kind, {kind!r:.40}")
        at = _ORDER.index(kind)
        if at < last or (found[kind] and kind in _SINGLE) or (last < 0 < at):
            raise InvalidInputError(f"a row out of order, {kind!r}")
        last = at
        found[kind].append(_checked(kind, fields))
    if not found["session"] or not found["revision"]:
        raise InvalidInputError("a session without a revision")
    [[session]] = found["session"]
    revisions = _revisions(found["revision"])
    labels = _unique("label", found["label"])
    for name, (revision,) in labels.items():
        if revision not in revisions:
            raise InvalidInputError(
                f"label {name!r:.40} names revision {revision}, which is missing"
            )
    return SessionRows(
        session,
        next((meta._replace(session=session) for [meta] in found["meta"]), None),
        list(revisions.values()),
        {name: revision for name, (revision,) in labels.items()},
        [
            Attachment(name, session, uri, digest, owned_by, COMMITTED, *times)
            for name, (uri, digest, owned_by, *times) in _unique(
                "attachment", found["attachment"]
            ).items()
        ],
        {
            turn: _receipt(turn, fields, revisions)
            for turn, fields in _unique("receipt", found["receipt"]).items()
        },
    )


def _checked(kind: str, fields: list[Any]) -> list[Any]:
    checks = _FIELDS[kind]
    if len(fields) != len(checks):
        if kind != "receipt" or len(fields) != len(checks) - _REMOVED_FIELDS:
            raise InvalidInputError(f"a row {kind!r} with {len(fields)} fields")
        fields = [*fields, [], None]
    return [check(field) for check, field in zip(checks, fields, strict=True)]


def _unique(kind: str, rows: list[list[Any]]) -> dict[str, list[Any]]:
    """Rows by their first field."""
    found = {name: fields for name, *fields in rows}
    if len(found) != len(rows):
        raise InvalidInputError(f"two rows {kind!r} of one name")
    return found


def _revisions(rows: list[list[Any]]) -> dict[int, HeadRow]:
    found: dict[int, HeadRow] = {}
    for row in rows:
        revision, created, committed, manifest, operation, turn, hidden, *more = row
        before = next(reversed(found), 0)
        if revision <= before:
            raise InvalidInputError(f"revision {revision} after {before}")
        rewound_to, origin, adopted = more
        found[revision] = HeadRow(
            revision=revision,
            created_at_ms=created,
            committed_at_ms=committed,
            manifest=manifest,
            hidden=hidden,
            operation=operation,
            turn=turn,
            rewound_to=rewound_to,
            origin=origin,
            adopted=adopted,
            long_id=None,
        )
    return found


def _receipt(turn: str, fields: list[Any], revisions: dict[int, HeadRow]) -> Receipt:
    version, content_hash, revision, first, nodes, removed, leaf = fields
    if version > _MAX_VERSION or revision not in revisions or revisions[revision].turn != turn:
        raise InvalidInputError(f"a receipt of turn {turn!r:.40}, which is not that of a revision")
    if any(at >= nodes + len(removed) for at, _ in removed):
        raise InvalidInputError("removed nodes of a turn at positions beyond its nodes")
    return Receipt(version, content_hash, revision, b"", first, nodes, removed, leaf)


# --- the fields of a bundle's rows --------------------------------------------------------------


def _text(what: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if type(value) is not str:
            raise InvalidInputError(f"{what} that is not text")
        keys.id_bytes(value, what)
        return value

    return check


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_TIME:
        raise InvalidInputError(f"{value!r:.40} where a number should be")
    return value


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise InvalidInputError(f"{value!r:.40} where a digest should be")
    return value


def _operation(value: Any) -> str:
    if type(value) is not str or value not in OPERATIONS:
        raise InvalidInputError(f"an unknown operation, {value!r:.40}")
    return value


def _origin(value: Any) -> Origin:
    if type(value) is not list or len(value) != len(Origin._fields):
        raise InvalidInputError(f"{value!r:.40} where an origin should be")
    session, revision, node = value
    return Origin(
        _text("a session id")(session), _count(revision), _optional(_text("a node id"))(node)
    )


def _meta(fields: Any) -> SessionMeta:
    """Meta, without the id of its session."""
    if type(fields) is not dict:
        raise InvalidInputError(f"{fields!r:.40} where meta should be")
    _count(fields.get("created_at_ms"))
    unknown = set(fields) - set(SessionMeta._fields[1:])
    if unknown:
        raise ForeignBundleError(
            f"a session's meta has {sorted(unknown)[0]!r}, which this release does not "
            "know: upgrade casstore"
        )
    try:
        return SessionMeta("", **fields)
    except TypeError as exc:
        raise InvalidInputError(f"meta lacks a field: {exc}") from exc


def _removed(places: Any) -> tuple[tuple[int, str], ...]:
    """The nodes of a turn that are gone: the position of each among all of them, and its id."""
    if type(places) is not list or any(type(one) is not list or len(one) != 2 for one in places):
        raise InvalidInputError(f"removed nodes of a turn: {places!r:.40}")
    found = {_count(at): _text("a node id")(node) for at, node in places}
    if len(found) != len(places):
        raise InvalidInputError("two removed nodes of a turn at one position")
    return tuple(found.items())


_TURN: Final = _text("a turn id")
_FIELDS: Final[dict[str, tuple[Callable[[Any], Any], ...]]] = {
    "session": (_text("a session id"),),
    "meta": (_meta,),
    "revision": (
        _count, _count, _count, _digest, _operation, _optional(_TURN), _optional(_digest),
        _optional(_count), _optional(_origin), _optional(_origin),
    ),
    "label": (_text("a label"), _count),
    "attachment": (
        _text("an attachment id"), _optional(_text("a uri")),
        _optional(lambda value: Digest(_digest(value))), _optional(_text("an owner")),
        _count, _count,
    ),
    "receipt": (
        _TURN, _count, _digest, _count, _count, _count, _removed, _optional(_text("a leaf")),
    ),
}  # fmt: skip
_ORDER: Final = tuple(_FIELDS)
_SINGLE: Final = ("session", "meta")
# The last fields of a receipt, which it has only if nodes of the turn were removed.
_REMOVED_FIELDS: Final = 2
