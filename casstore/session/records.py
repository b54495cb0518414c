"""Records: small values of other systems by key. A record keeps alive the objects it links to.

    row = 00 ‖ value
    row = 01 ‖ length of the list (4) ‖ list of the key's texts ‖ value

A value is encoded as inside a container: a short value is stored in the row, a long one as a link.
gc treats the links of rows (``row_links``) as roots. A ``Draft`` collects changes and commits them
as one atomic write (P5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeVar

from casstore.engine.protocol import (
    MAX_ROW_VALUE_BYTES,
    CheckedWrite,
    Condition,
    DeleteRow,
    ObjectsExist,
    PutRow,
    Row,
    RowChange,
    RowIs,
    RowKey,
    StoredObject,
    Write,
)
from casstore.errors import CasstoreError, CorruptionError, InvalidInputError
from casstore.format import splitting
from casstore.format.canonical import Link, links_in, pack_checked, unpack_checked
from casstore.format.digest import Digest, Kind
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH
from casstore.format.splitting import (
    Emit,
    Encoded,
    ExpansionGuard,
    ListTail,
    encode_split,
    list_entry,
)
from casstore.objects import splice, values
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter
from casstore.session.arguments import check_count, check_flag, list_of
from casstore.session.record_keys import CUT, KeySpace, past, split_texts
from casstore.session.scanning import scan
from casstore.store import Store, check_store

_TABLE: Final = "records"
_PLAIN: Final = b"\x00"
_WITH_KEY: Final = b"\x01"
_LENGTH_BYTES: Final = 4
_PAGE: Final = 256
# The first byte of an encoded link.
_LINK_BYTE: Final = b"\xc7"
# Passed as the digest when the value in a row is read: a row is not an object, so it has none.
_ROW_NAME: Final = b"row"

Made = TypeVar("Made")


class Record:
    """A record as it was read. Its value is decoded when accessed."""

    __slots__ = ("_store", "key", "row")

    def __init__(self, store: Store, key: tuple[str, ...], row: bytes) -> None:
        self._store = store
        self.key = key
        #: The stored row: two records are equal if their rows are.
        self.row = row

    @property
    def is_inline(self) -> bool:
        """True if the row holds the value, except its long parts; False: a link to the value."""
        return _value_bytes(self.row)[:1] != _LINK_BYTE

    @property
    def value(self) -> Any:
        """The value, read and decoded on each access."""
        item = StoredObject(Kind.VALUE, _value_bytes(self.row))
        reader = PieceReader(self._store.engine)
        return values.read_value(reader, _ROW_NAME, item, max_bytes=DEFAULT_MAX_BYTES)


class Table:
    """Records of one kind, by keys of ``parts`` texts each, in order of the texts.

    >>> table, draft = Table(store, "notes.pages", 2), Draft(store)
    >>> row = draft.put(table, ("anna", "1"), {"text": "hello"})
    >>> draft.commit()
    >>> [(record.key, record.value) for record in table.scan("anna")]
    [(('anna', '1'), {'text': 'hello'})]
    """

    def __init__(self, store: Store, name: str, parts: int) -> None:
        check_store(store)
        self._store = store
        self.keys = KeySpace(name, parts)

    def find(self, *key: str) -> Record | None:
        """One record; None if it does not exist."""
        return find_records(self._store, [(self, key)])[0]

    def find_many(self, keys: Sequence[tuple[str, ...]]) -> list[Record | None]:
        """Records from one snapshot, in the order of ``keys``."""
        return find_records(self._store, [(self, key) for key in list_of(keys, "keys")])

    def scan(
        self,
        *prefix: str,
        after: str | None = None,
        before: str | None = None,
        reverse: bool = False,
        page: int = _PAGE,
    ) -> Iterator[Record]:
        """Records whose keys start with ``prefix``, in order; each page is a separate snapshot.

        With ``before``, only those whose first text after ``prefix`` is less; with ``after``, only
        those where it is greater.
        """
        start = self.keys.key(prefix)
        stop = past(start) if before is None else self.keys.key((*prefix, before))
        if after is not None:
            start = past(self.keys.key((*prefix, after)))
        return self._scan(start, stop, reverse, page)

    def scan_starting(
        self, text: str, *prefix: str, after: str | None = None, page: int = _PAGE
    ) -> Iterator[Record]:
        """Records whose keys start with ``prefix`` and a text that starts with ``text``, in order.

        With ``after``, only those whose text is greater. Texts that are too long for a key and
        share their truncated part are sorted in memory.
        """
        start = self.keys.starting(prefix, text)
        stop = past(start)
        if after is not None:
            start = max(start, self.keys.starting(prefix, after))
        if start >= stop:
            return
        at = len(prefix)
        # Texts too long for a key are sorted by hash after their truncated part. Without sorting
        # them here, a caller that continues with ``after`` would miss some.
        for _, alike in groupby(
            self._scan(start, stop, False, page),
            lambda record: self.keys.starting(prefix, record.key[at]),
        ):
            for record in sorted(alike, key=lambda record: record.key[at]):
                found = record.key[at]
                if found.startswith(text) and (after is None or found > after):
                    yield record

    def groups(
        self, depth: int, *prefix: str, after: tuple[str, ...] | None = None
    ) -> Iterator[tuple[str, ...]]:
        """The distinct first ``depth`` texts of the keys that start with ``prefix``, in order.

        Reads one row of each group. With ``after``, only groups after these texts.
        """
        check_count(depth, "depth", least=1)
        if depth > self.keys.parts:
            raise InvalidInputError(f"depth must be at most {self.keys.parts}, got {depth}")
        start = self.keys.key(prefix)
        stop = past(start)
        if after is not None:
            start = past(self.keys.key(after))
        while rows := self._store.engine.scan_rows(_TABLE, start=start, stop=stop, limit=1):
            yield self.record_of(rows[0]).key[:depth]
            start = past(self.keys.group(rows[0].key, depth))

    def last_of_groups(self, text: str) -> Iterator[Record]:
        """The last record of each first text that starts with ``text``; texts in reverse order.

        Reads one row of each first text.
        """
        start = self.keys.starting((), text)
        stop = past(start)
        while rows := self._store.engine.scan_rows(
            _TABLE, start=start, stop=stop, limit=1, reverse=True
        ):
            record = self.record_of(rows[0])
            # Texts that are too long for a key share their truncated part with others.
            if record.key[0].startswith(text):
                yield record
            stop = self.keys.group(rows[0].key, 1)

    def _scan(self, start: bytes, stop: bytes, reverse: bool, page: int) -> Iterator[Record]:
        check_flag(reverse, "reverse")
        check_count(page, "page", least=1)
        while True:
            rows = self._store.engine.scan_rows(
                _TABLE, start=start, stop=stop, limit=page, reverse=reverse
            )
            for row in rows:
                yield self.record_of(row)
            if len(rows) < page:
                return
            if reverse:
                stop = rows[-1].key
            else:
                start = rows[-1].key + b"\0"

    def size_bytes(self, *prefix: str) -> int:
        """The bytes of keys and values of the records whose keys start with ``prefix``."""
        start = self.keys.key(prefix)
        rows = scan(self._store.engine, _TABLE, start, past(start))
        return sum(len(row.key) + len(row.value) for row in rows)

    def read_each(
        self, records: Iterable[Record], read: Callable[[Record], Made]
    ) -> Iterator[Made]:
        """Call ``read`` on listed records, and yield the results.

        If a record was replaced or removed since it was listed, gc may have removed its objects,
        and ``read`` raises CorruptionError. Then a replaced record is read again, a removed one is
        left out; if the row is unchanged, the error is raised.
        """
        for listed in records:
            record: Record | None = listed
            while record is not None:
                try:
                    made = read(record)
                except CorruptionError:
                    before, record = record, self.find(*record.key)
                    if record is not None and record.row == before.row:
                        raise
                    continue
                yield made
                break

    def place(self, *key: str) -> RowKey:
        """The row key of a record."""
        return RowKey(_TABLE, self.keys.row(key))

    def record_of(self, row: Row) -> Record:
        """A row of this table as a record."""
        if row.value[:1] == _WITH_KEY:
            key = tuple(_key_list(row.value))
        else:
            key = self.keys.texts(row.key)
        return Record(self._store, key, row.value)


def find_records(
    store: Store, places: Sequence[tuple[Table, tuple[str, ...]]]
) -> list[Record | None]:
    """Records of several tables from one snapshot, in the order given."""
    rows = store.engine.get_rows([RowKey(_TABLE, _row_key(table, key)) for table, key in places])
    return [
        None if row is None else Record(store, tuple(key), row)
        for (_, key), row in zip(places, rows, strict=True)
    ]


def _row_key(table: Table, key: tuple[str, ...]) -> bytes:
    if not isinstance(table, Table):
        raise InvalidInputError(f"table must be a Table, got {type(table).__name__}")
    return table.keys.row(key)


class Draft:
    """Changes to records and the values they link to, for one write.

    >>> table, draft = Table(store, "notes.pages", 2), Draft(store)
    >>> draft.expect(table, ("anna", "1"), None)  # fail if another writer has put it
    >>> row = draft.put(table, ("anna", "1"), {"text": "hello"})
    >>> draft.commit()
    >>> table.find("anna", "1").value["text"]
    'hello'
    """

    def __init__(self, store: Store) -> None:
        if type(store) is not Store:
            check_store(store)
        self._store = store
        self._writer = PieceWriter()
        #: Stores one piece of a value with this write (``format/splitting.py``).
        self.emit: Emit = self._writer.emit
        self._rows: list[RowChange] = []
        self._conditions: list[Condition] = []
        self._links: list[bytes] = []
        # False if the engine must check the write: it holds rows that the caller has built, or one
        # that is too long.
        self._is_checked = True

    @property
    def size_bytes(self) -> int:
        """The bytes of the objects collected so far."""
        return self._writer.size_bytes

    def keep(self, value: Any) -> Link:
        """Store a value with this write; returns a link to it."""
        return Link(Digest(splitting.split(value, self.emit)))

    def keep_blob(self, content: bytes) -> Link:
        """Store opaque bytes with this write; returns a link to them."""
        if type(content) is not bytes:
            raise InvalidInputError(f"content must be bytes, got {type(content).__name__}")
        return Link(Digest(self.emit(Kind.BLOB, content, [])))

    def keep_long(
        self, value: Any, *, least_bytes: int | None = None, max_depth: int = MAX_DEPTH
    ) -> Any:
        """Store a long value as an object and return a link to it; return a short value unchanged.

        A value is long if the format stores it as an object of its own, or if its encoding has at
        least ``least_bytes``. ``max_depth`` limits the nesting of a value that the caller puts
        inside another.
        """
        if least_bytes is not None:
            check_count(least_bytes, "least_bytes")
        emit = self.emit
        encoded = encode_split(value, max_depth, emit)
        if encoded.outlined is not None:
            return Link(Digest(encoded.outlined))
        if least_bytes is None or len(encoded.data) < least_bytes:
            return value
        return Link(Digest(splitting.root_object(encoded, emit)))

    def keep_apart(self, value: Any) -> Any:
        """Store a value that is long or contains links, and return a link to it; else the value.

        With links in the row, each reader of the row would also read the objects linked to.
        """
        emit = self.emit
        encoded = encode_split(value, MAX_DEPTH, emit)
        if encoded.outlined is not None:
            return Link(Digest(encoded.outlined))
        if encoded.links and type(value) is not Link:
            return Link(Digest(splitting.root_object(encoded, emit)))
        return value

    def extend(self, link: Link, items: Sequence[Any]) -> Link:
        """Store a list with items appended to a stored one; returns the link of the new list.

        The link is the one that storing the whole new list would return, but only the last
        pieces are read and written. ObjectNotFoundError, from here or from the commit, if gc has
        removed the old list.
        """
        if type(link) is not Link:
            raise InvalidInputError(f"link must be a Link, got {type(link).__name__}")
        encoded, _ = self.append(self.open_list(link), list_of(items, "items"))
        return Link(Digest(splitting.root_object(encoded, self.emit)))

    def open_list(self, link: Link) -> ListTail:
        """Read the end of a stored list, for ``append``; InvalidInputError if it is not a list."""
        reader = PendingReader(self._store.engine, self._writer)
        container = splice.open_container(reader, reader.get(link.digest))
        if container is None or container.kind != Kind.LIST:
            raise InvalidInputError("link must name a list: only a list can be extended")
        return splice.list_tail(reader, container)

    def append(self, tail: ListTail, items: Sequence[Any]) -> tuple[Encoded, ListTail]:
        """Store the list that ends with ``tail``, with ``items`` appended.

        Returns its encoding, and its end for the next call.
        """
        emit = self.emit
        guard = None
        if not tail.length:
            guard = ExpansionGuard(emit)
            emit = guard.emit
        entries = [list_entry(encode_split(item, MAX_DEPTH - 1, emit)) for item in items]
        encoded, tail = tail.append(entries, emit)
        if guard is not None:
            guard.require_bounded(encoded.links)
        return encoded, tail

    def put(self, table: Table, key: tuple[str, ...], value: Any) -> bytes:
        """Write a record, replacing any earlier one; returns the new row (``Record.row``)."""
        encoded = encode_split(value, MAX_DEPTH, self.emit)
        self._links += encoded.links
        return self._put(table, key, encoded.data)

    def put_inline(self, table: Table, key: tuple[str, ...], value: Any) -> bytes:
        """As ``put``, but the row holds the whole value, however long its texts and bytes are.

        For values that are read in bulk and that no other row shares. They must not have links.
        """
        return self._put(table, key, pack_checked(value))

    def copy(self, table: Table, record: Record, key: tuple[str, ...]) -> None:
        """Copy a record to another key, on condition that it is unchanged."""
        _check_record(record)
        self.expect(table, record.key, record)
        self._put(table, key, _value_bytes(record.row))

    def delete(self, table: Table, key: tuple[str, ...]) -> None:
        """Remove a record if it exists."""
        self._rows.append(DeleteRow(_TABLE, _row_key(table, key)))

    def expect(self, table: Table, key: tuple[str, ...], record: Record | bytes | None) -> None:
        """Require that the record, or its row, is unchanged; None: that no record has this key."""
        row = record if record is None or isinstance(record, bytes) else _check_record(record).row
        self._conditions.append(RowIs(_TABLE, _row_key(table, key), row))

    def also(self, write: Write) -> None:
        """Add rows of other tables and their conditions to the write."""
        if not isinstance(write, Write) or write.objects or write.deletes:
            raise InvalidInputError("write must be a Write that has only conditions and rows")
        self._conditions.extend(write.conditions)
        self._rows.extend(write.rows)
        self._is_checked = False

    def commit(self) -> None:
        """Write all changes in one transaction.

        ConditionFailedError if an expected record has changed; ObjectNotFoundError if a linked
        object is not stored. In both cases nothing is written.
        """
        if self._writer.objects or self._rows:
            self._store.engine.write(self.as_write())
        else:
            # Nothing to write. An empty write still waits until earlier writes are on disk.
            self._store.engine.write(Write())

    def as_write(self) -> Write:
        """The engine write of this draft, to be committed in one transaction with a session.

        ``Commit(also=draft.as_write())`` writes both or neither. If an expected record has
        changed, the commit raises ConditionFailedError.
        """
        conditions = list(self._conditions)
        # The objects that a row links to must exist, or be written with it (P3).
        older = [digest for digest in self._links if self._writer.find(digest) is None]
        if older:
            conditions.append(ObjectsExist(older))
        kind = CheckedWrite if self._is_checked else Write
        return kind(self._writer.objects, conditions, self._rows)

    def _put(self, table: Table, key: tuple[str, ...], data: bytes) -> bytes:
        encoded_key = _row_key(table, key)
        head = _PLAIN
        if CUT in encoded_key:
            texts = pack_checked(list(key))
            head = _WITH_KEY + len(texts).to_bytes(_LENGTH_BYTES, "big") + texts
        row = head + data
        if len(row) > MAX_ROW_VALUE_BYTES:
            # The engine refuses it, with the reason.
            self._is_checked = False
        self._rows.append(PutRow(_TABLE, encoded_key, row))
        return row


def _check_record(record: Any) -> Record:
    if not isinstance(record, Record):
        raise InvalidInputError(f"record must be a Record, got {type(record).__name__}")
    return record


def row_name(key: bytes, row: bytes) -> str:
    """A row of the engine's table ``records`` as reports show it: its ``Table`` and its key."""
    table, _, rest = key.partition(b"\0")
    if row[:1] == _WITH_KEY:
        texts = _key_list(row)
    else:
        texts = list(split_texts(rest))
    return f"record {table.decode()} {' / '.join(texts)}"


def row_links(row: bytes) -> list[bytes]:
    """The digests that a row keeps alive.

    >>> table, draft = Table(store, "notes.pages", 2), Draft(store)
    >>> link = draft.keep("a long text")
    >>> row_links(draft.put(table, ("anna", "1"), [link])) == [link.digest]
    True
    """
    try:
        return links_in(_value_bytes(row))
    except CorruptionError:
        raise
    except (CasstoreError, ValueError) as exc:
        raise CorruptionError("a record is damaged") from exc


def _value_bytes(row: bytes) -> bytes:
    if row[:1] == _PLAIN:
        return row[1:]
    if row[:1] == _WITH_KEY:
        return row[1 + _LENGTH_BYTES + _key_length(row) :]
    raise CorruptionError("a record is damaged, or was written by a newer release")


def _key_length(row: bytes) -> int:
    return int.from_bytes(row[1 : 1 + _LENGTH_BYTES], "big")


def _key_list(row: bytes) -> list[str]:
    start = 1 + _LENGTH_BYTES
    try:
        texts = unpack_checked(row[start : start + _key_length(row)])
    except (TypeError, ValueError) as exc:
        raise CorruptionError("the key in a record is damaged") from exc
    if type(texts) is not list or not all(type(text) is str for text in texts):
        raise CorruptionError("the key in a record is damaged")
    return texts
