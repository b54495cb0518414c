"""The rows of a session as a bundle carries them: plain, and free of what one store alone knows.

    session      [id]
    meta         [fields of SessionMeta but the id, as a map]
    revision     [revision, created at, committed at, manifest, operation, turn, hidden,
                  rewound to, origin, adopted]
    label        [name, revision]
    attachment   [id, uri, digest, owner, intent at, committed at]
    receipt      [turn, version, intent, revision, first position, number of nodes], and if nodes of
                 the turn were removed since: [[place, id] …], leaf or nil

In this order; revisions, ascending, the last of them the head. Not carried are leases and
queued work, which belong to where the work is done, and attachments that are only announced or
condemned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import ForeignBundleError, InvalidInputError
from casstore.format.digest import Digest
from casstore.format.hashing import DIGEST_BYTES
from casstore.session import heads, keys
from casstore.session.attachments import COMMITTED
from casstore.session.data import Attachment, Origin, SessionMeta
from casstore.session.heads import HeadRow
from casstore.session.receipts import Receipt

_MAX_TIME: Final = (1 << 63) - 1
_MAX_VERSION: Final = 255
_ORDER: Final = ("session", "meta", "revision", "label", "attachment", "receipt")


class SessionRows(NamedTuple):
    """A session without its objects."""

    session: str
    meta: SessionMeta | None
    #: Ascending.
    revisions: Sequence[HeadRow]
    labels: dict[str, int]
    attachments: Sequence[Attachment]
    #: By turn; their manifests stand for nothing.
    receipts: dict[str, Receipt]

    def named(self) -> set[bytes]:
        """The digests that these rows keep alive."""
        found = {row.manifest for row in self.revisions}
        found.update(row.hidden for row in self.revisions if row.hidden is not None)
        found.update(bytes(one.digest) for one in self.attachments if one.digest is not None)
        return found


def encode(rows: SessionRows) -> Iterator[list[Any]]:
    """Spell the rows one by one."""
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
        told = [
            "receipt", turn, receipt.version, receipt.intent, receipt.revision,
            receipt.first, receipt.node_count,
        ]  # fmt: skip
        if receipt.removed or receipt.leaf is not None:
            told += [[list(each) for each in receipt.removed], receipt.leaf]
        yield told


def decode(rows: Iterable[list[Any]]) -> SessionRows:
    """Read the rows of a bundle; InvalidInputError if they are not those of one session."""
    gathered = _Gathered()
    for name, *fields in rows:
        gathered.take(name, fields)
    return gathered.finish()


class _Gathered:
    """Rows on their way in, each checked for what it claims to be."""

    def __init__(self) -> None:
        self._at = -1
        self._session: str | None = None
        self._meta: SessionMeta | None = None
        self._revisions: dict[int, HeadRow] = {}
        self._labels: dict[str, int] = {}
        self._attachments: dict[str, Attachment] = {}
        self._receipts: dict[str, Receipt] = {}

    def take(self, name: str, fields: list[Any]) -> None:
        """Take the next row."""
        if name not in _ORDER:
            raise InvalidInputError(f"a row of an unknown kind, {name!r:.40}")
        at = _ORDER.index(name)
        if at < self._at or (at == self._at and at < _ORDER.index("revision")):
            raise InvalidInputError(f"a row out of order, {name!r}")
        if self._at < 0 and at != 0:
            raise InvalidInputError("rows that name no session")
        self._at = at
        try:
            getattr(self, f"_take_{name}")(*fields)
        except TypeError as exc:
            raise InvalidInputError(f"a row {name!r} with {len(fields)} fields") from exc

    def _take_session(self, session: Any) -> None:
        self._session = _id(session, "a session id")

    def _take_meta(self, fields: Any) -> None:
        assert self._session is not None
        if type(fields) is not dict or type(fields.get("created_at_ms")) is not int:
            raise InvalidInputError("a meta row that is none")
        strange = set(fields) - set(SessionMeta._fields[1:])
        if strange:
            raise ForeignBundleError(
                f"a session's meta has {sorted(strange)[0]!r}, which this release does not "
                "know: upgrade casstore"
            )
        _time(fields["created_at_ms"])
        self._meta = SessionMeta(self._session, **fields)

    def _take_revision(
        self,
        revision: Any,
        created_at_ms: Any,
        committed_at_ms: Any,
        manifest: Any,
        operation: Any,
        turn: Any,
        hidden: Any,
        rewound_to: Any,
        origin: Any,
        adopted: Any,
    ) -> None:
        before = next(reversed(self._revisions), 0)
        if _count(revision) <= before:
            raise InvalidInputError(f"revision {revision} after {before}")
        if operation not in heads.OPERATIONS:
            raise InvalidInputError(f"an operation {operation!r:.40}")
        self._revisions[revision] = HeadRow(
            revision,
            _time(created_at_ms),
            _time(committed_at_ms),
            _digest(manifest),
            None if hidden is None else _digest(hidden),
            operation,
            None if turn is None else _id(turn, "a turn id"),
            None if rewound_to is None else _count(rewound_to),
            None if origin is None else _origin(origin),
            None if adopted is None else _origin(adopted),
            None,
        )

    def _take_label(self, name: Any, revision: Any) -> None:
        if _count(revision) not in self._revisions or name in self._labels:
            raise InvalidInputError(f"a label for revision {revision!r:.40}, which is not there")
        self._labels[_id(name, "a label")] = revision

    def _take_attachment(
        self, name: Any, uri: Any, digest: Any, owner: Any, intent_at: Any, committed_at: Any
    ) -> None:
        assert self._session is not None
        if name in self._attachments:
            raise InvalidInputError(f"the attachment {name!r:.40} twice")
        self._attachments[name] = Attachment(
            _id(name, "an attachment id"),
            self._session,
            None if uri is None else _id(uri, "a uri"),
            None if digest is None else Digest(_digest(digest)),
            None if owner is None else _id(owner, "an owner"),
            COMMITTED,
            _time(intent_at),
            _time(committed_at),
        )

    def _take_receipt(
        self,
        turn: Any,
        version: Any,
        meaning: Any,
        revision: Any,
        first: Any,
        nodes: Any,
        removed: Any = (),
        leaf: Any = None,
    ) -> None:
        if _count(revision) not in self._revisions or turn in self._receipts:
            raise InvalidInputError(f"a receipt for revision {revision!r:.40}")
        if self._revisions[revision].turn != turn or _count(version) > _MAX_VERSION:
            raise InvalidInputError(f"a receipt that revision {revision} does not know")
        self._receipts[_id(turn, "a turn id")] = Receipt(
            version,
            _digest(meaning),
            revision,
            b"",
            _count(first),
            _count(nodes),
            _removed(removed, nodes),
            None if leaf is None else _id(leaf, "a leaf"),
        )

    def finish(self) -> SessionRows:
        """All of them together."""
        if self._session is None or not self._revisions:
            raise InvalidInputError("a session without a revision")
        return SessionRows(
            self._session,
            self._meta,
            list(self._revisions.values()),
            self._labels,
            list(self._attachments.values()),
            self._receipts,
        )


def _removed(places: Any, left: int) -> tuple[tuple[int, str], ...]:
    """The nodes of a turn that are gone: where each stood among all of them, and its id."""
    if type(places) not in (list, tuple):
        raise InvalidInputError(f"removed nodes of a turn: {places!r:.40}")
    found: dict[int, str] = {}
    for place in places:
        if type(place) is not list or len(place) != 2:
            raise InvalidInputError(f"a removed node of a turn: {place!r:.40}")
        found[_count(place[0])] = _id(place[1], "a node id")
    if len(found) != len(places) or any(at >= left + len(found) for at in found):
        raise InvalidInputError("removed nodes of a turn stand where none can")
    return tuple(found.items())


def _id(value: Any, what: str) -> str:
    if type(value) is not str:
        raise InvalidInputError(f"{what} that is no text")
    keys.id_bytes(value, what)
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_TIME:
        raise InvalidInputError(f"{value!r:.40} where a number should stand")
    return value


def _time(value: Any) -> int:
    return _count(value)


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise InvalidInputError(f"{value!r:.40} where a digest should stand")
    return value


def _origin(value: Any) -> Origin:
    if type(value) is not list or len(value) != 3:
        raise InvalidInputError("an origin that is none")
    session, revision, node = value
    return Origin(
        _id(session, "a session id"),
        _count(revision),
        None if node is None else _id(node, "a node id"),
    )
