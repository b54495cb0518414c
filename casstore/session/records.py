"""Records: small values of other systems by key, each keeping alive what it links to.

    row = 00 ‖ value
    row = 01 ‖ length of the list (4) ‖ list of the key's texts ‖ value

A value is spelled as a container of values would hold it: short ones stand in the row, of
longer ones a link. Whatever the row links to is reached from it (``row_links``), so gc keeps
it. A ``Draft`` collects changes and happens as one write, wholly or not at all (P5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeVar

from casstore.engine.protocol import (
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
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH
from casstore.objects import splice, values
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter
from casstore.session.arguments import check_count, check_flag, list_of
from casstore.session.record_keys import KeySpace, past, split_texts
from casstore.session.scanning import scan
from casstore.store import Store, check_store

_TABLE: Final = "records"
_PLAIN: Final = b"\x00"
_WITH_KEY: Final = b"\x01"
_LENGTH_BYTES: Final = 4
_PAGE: Final = 256
# What a link starts with.
_LINK_BYTE: Final = b"\xc7"
# A row is no object: what it is called while it is put together.
_ROW_NAME: Final = b"row"

Made = TypeVar("Made")


class Record:
    """A row as it was found: its key, and its value when asked for."""

    __slots__ = ("_store", "key", "row")

    def __init__(self, store: Store, key: tuple[str, ...], row: bytes) -> None:
        self._store = store
        self.key = key
        #: As it is stored: two records are the same if these are.
        self.row = row

    @property
    def is_inline(self) -> bool:
        """Does the row itself hold what it can of the value, and not just a link to all of it?"""
        return _value_bytes(self.row)[:1] != _LINK_BYTE

    @property
    def value(self) -> Any:
        """What was put, read and decoded each time."""
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
        """One record; None if there is none."""
        return find_records(self._store, [(self, key)])[0]

    def find_many(self, keys: Sequence[tuple[str, ...]]) -> list[Record | None]:
        """Records of one moment, in the order asked for."""
        return find_records(self._store, [(self, key) for key in list_of(keys, "keys")])

    def scan(
        self,
        *prefix: str,
        after: str | None = None,
        before: str | None = None,
        reverse: bool = False,
        page: int = _PAGE,
    ) -> Iterator[Record]:
        """Records whose keys start with ``prefix``, in order; each page is of its own moment.

        With ``before``, only those whose next text is less; with ``after``, greater.
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

        With ``after``, only those whose text is greater. Of texts too long for a key, those
        that begin alike are held in memory together.
        """
        start = self.keys.starting(prefix, text)
        stop = past(start)
        if after is not None:
            start = max(start, self.keys.starting(prefix, after))
        if start >= stop:
            return
        place = len(prefix)
        # Texts too long for a key lie behind what they begin with, in no order. Whoever goes on
        # behind one that was listed too early would miss others.
        for _, alike in groupby(
            self._scan(start, stop, False, page),
            lambda record: self.keys.starting(prefix, record.key[place]),
        ):
            for record in sorted(alike, key=lambda record: record.key[place]):
                found = record.key[place]
                if found.startswith(text) and (after is None or found > after):
                    yield record

    def groups(
        self, depth: int, *prefix: str, after: tuple[str, ...] | None = None
    ) -> Iterator[tuple[str, ...]]:
        """The different first ``depth`` texts of keys, without reading the rows between them.

        With ``after``, only those behind these texts.
        """
        check_count(depth, "how many texts are told apart", least=1)
        if depth > self.keys.parts:
            raise InvalidInputError(f"a key has {self.keys.parts} texts, not {depth}")
        start = self.keys.key(prefix)
        stop = past(start)
        if after is not None:
            start = past(self.keys.key(after))
        while rows := self._store.engine.scan_rows(_TABLE, start=start, stop=stop, limit=1):
            yield self.record_of(rows[0]).key[:depth]
            start = past(self.keys.group(rows[0].key, depth))

    def _scan(self, start: bytes, stop: bytes, reverse: bool, page: int) -> Iterator[Record]:
        check_flag(reverse, "whether the last comes first")
        check_count(page, "how many are read at once", least=1)
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
        """What ``read`` makes of records that were listed, each as it is when its turn comes.

        What a row links to may be gone by then: one that was replaced is read anew, one that
        was removed is left out, and if it is the same, the CorruptionError is told.
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
        """Where a record of this key stands."""
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
    """Records of several tables, all of one moment, in the order asked for."""
    rows = store.engine.get_rows([RowKey(_TABLE, _row_key(table, key)) for table, key in places])
    return [
        None if row is None else Record(store, tuple(key), row)
        for (_, key), row in zip(places, rows, strict=True)
    ]


def _row_key(table: Table, key: tuple[str, ...]) -> bytes:
    if not isinstance(table, Table):
        raise InvalidInputError(f"a table is a Table, not {type(table).__name__}")
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
        check_store(store)
        self._store = store
        self._writer = PieceWriter()
        self._rows: list[RowChange] = []
        self._conditions: list[Condition] = []
        self._links: list[bytes] = []

    @property
    def size_bytes(self) -> int:
        """The bytes of the objects collected so far."""
        return self._writer.size_bytes

    def keep(self, value: Any) -> Link:
        """Store a value with this write; a link to it."""
        return Link(Digest(splitting.split(value, self._writer.emit)))

    def keep_blob(self, content: bytes) -> Link:
        """Store opaque bytes with this write; a link to them."""
        if type(content) is not bytes:
            raise InvalidInputError(f"a blob is made of bytes, not {type(content).__name__}")
        return Link(Digest(self._writer.emit(Kind.BLOB, content, [])))

    def keep_long(
        self, value: Any, *, least_bytes: int | None = None, max_depth: int = MAX_DEPTH
    ) -> Any:
        """A link to the value if it is long enough for an object of its own, else itself.

        Long enough by the rules of values, or, as it is spelled, of ``least_bytes``. What then
        stands inside of something else has to leave room for that: ``max_depth``.
        """
        if least_bytes is not None:
            check_count(least_bytes, "how many bytes are long")
        emit = self._writer.emit
        spelled = splitting.spell(value, max_depth, emit)
        if spelled.outlined is not None:
            return Link(Digest(spelled.outlined))
        if least_bytes is None or len(spelled.data) < least_bytes:
            return value
        return Link(Digest(splitting.root_object(spelled, emit)))

    def keep_apart(self, value: Any) -> Any:
        """A link to the value if it is long, or links to anything; else itself.

        In a row, what a value links to would be read with the row.
        """
        emit = self._writer.emit
        spelled = splitting.spell(value, MAX_DEPTH, emit)
        if spelled.outlined is not None:
            return Link(Digest(spelled.outlined))
        if spelled.links and type(value) is not Link:
            return Link(Digest(splitting.root_object(spelled, emit)))
        return value

    def extend(self, link: Link, items: Sequence[Any]) -> Link:
        """A link to the stored list with more items at its end, as if it were stored whole.

        Reads and writes only the pieces at the end. ObjectNotFoundError, now or on commit, if
        the list is no longer there.
        """
        if type(link) is not Link:
            raise InvalidInputError(f"a list is named by a Link, not {type(link).__name__}")
        items = list_of(items, "items")
        reader = PendingReader(self._store.engine, self._writer)
        container = splice.open_container(reader, reader.get(link.digest))
        if container is None or container.kind != Kind.LIST:
            raise InvalidInputError("only a list can be extended")
        new = [
            splitting.list_entry(splitting.spell(item, MAX_DEPTH - 1, self._writer.emit))
            for item in items
        ]
        end = splice.length(container)
        spelled = splice.splice(reader, container, end, 0, new, self._writer.emit)
        return Link(Digest(splitting.root_object(spelled, self._writer.emit)))

    def put(self, table: Table, key: tuple[str, ...], value: Any) -> bytes:
        """Write a record, whatever stood there before; the row as it will be (``Record.row``)."""
        spelled = splitting.spell(value, MAX_DEPTH, self._writer.emit)
        self._links += spelled.links
        return self._put(table, key, spelled.data)

    def copy(self, table: Table, record: Record, key: tuple[str, ...]) -> None:
        """Write what a record holds under another key, if the record is still as it was."""
        _check_record(record)
        self.expect(table, record.key, record)
        self._put(table, key, _value_bytes(record.row))

    def delete(self, table: Table, key: tuple[str, ...]) -> None:
        """Remove a record; it need not be there."""
        self._rows.append(DeleteRow(_TABLE, _row_key(table, key)))

    def expect(self, table: Table, key: tuple[str, ...], record: Record | None) -> None:
        """Let the write fail unless the record is this one; None: unless there is none."""
        row = None
        if record is not None:
            _check_record(record)
            row = record.row
        self._conditions.append(RowIs(_TABLE, _row_key(table, key), row))

    def also(self, write: Write) -> None:
        """Let rows of other tables change too, under the conditions given with them."""
        if not isinstance(write, Write) or write.objects or write.deletes:
            raise InvalidInputError("what goes along with records are conditions and rows")
        self._conditions.extend(write.conditions)
        self._rows.extend(write.rows)

    def commit(self) -> None:
        """Write everything at once.

        ConditionFailedError if an expected record is another; ObjectNotFoundError if something
        linked to is not stored. Then nothing has happened.
        """
        if self._writer.objects or self._rows:
            self._store.engine.write(self.as_write())
        else:
            # What was found to be done already may still have to reach the disk.
            self._store.engine.write(Write())

    def as_write(self) -> Write:
        """What ``commit`` would hand to the engine: to go beside the commit of a session.

        ``Commit(beside=draft.as_write())``: both happen, or neither. A record that is not
        the expected one ends the commit with ConditionFailedError.
        """
        conditions = list(self._conditions)
        # What a row links to must be there, or come with it (P3).
        older = [digest for digest in self._links if self._writer.find(digest) is None]
        if older:
            conditions.append(ObjectsExist(older))
        return Write(self._writer.objects, conditions, self._rows)

    def _put(self, table: Table, key: tuple[str, ...], data: bytes) -> bytes:
        spelled_key = _row_key(table, key)
        if table.keys.is_cut(key):
            texts = pack_checked(list(key))
            head = _WITH_KEY + len(texts).to_bytes(_LENGTH_BYTES, "big") + texts
        else:
            head = _PLAIN
        self._rows.append(PutRow(_TABLE, spelled_key, head + data))
        return head + data


def _check_record(record: Record) -> None:
    if not isinstance(record, Record):
        raise InvalidInputError(f"a record is a Record, not {type(record).__name__}")


def row_name(key: bytes, row: bytes) -> str:
    """What a row of the table ``records`` is called in reports: its table and the key's texts."""
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
    raise CorruptionError("a record is damaged, or of a newer kind")


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
