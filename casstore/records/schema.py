"""Schemas of record systems: the fields, key and indexes of a table, declared once.

A row is a NamedTuple. Its first fields are its key, the others are stored as a list:

    row     [field, field, …]     in the order declared, without trailing fields at their default
            field                 if there is only one, which has no default
    index   None                  if the key of the row follows from the index key
            key of the row        otherwise: one text, or a list of texts

The annotations of the NamedTuple are the types of the fields. Stored as they are: ``str``, ``int``,
``bool``, ``bytes``, ``float``, ``list``, ``Link``, ``Any``, and unions of these with None. Stored
as a list: tuples and NamedTuples, also as values of a mapping. Stored as a link: ``Digest``. If the
first field is a NamedTuple itself, its fields take its place, so that a row can extend a public
type. A last field ``record: Record | None = None`` is not stored: it is the record that was read.

A ``RowTable`` decodes rows, with a CorruptionError that names the table, the key and the field, and
keeps the indexes of a row up to date in the write that changes it. ``schema_check`` compares rows
with their indexes and parents.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints

from casstore.engine.protocol import Row
from casstore.errors import CasstoreError, CorruptionError, LimitError
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.session.record_keys import KeySpace
from casstore.session.records import Draft, Record, Table
from casstore.store import Store, check_store

R = TypeVar("R", bound=tuple[Any, ...])
Key = tuple[str, ...]
#: The parts of a key before they are encoded.
Parts = Sequence[str | int]
#: A table, and the key of a row in it.
RowPlace = tuple[Table, Key]

#: The greatest number that a key can hold.
MAX_NUMBER: Final = (1 << 63) - 1
_FIRST_LENGTH: Final = ord("a")
_PAGE: Final = 256
# Fields of these types are stored unchanged. The sets are the types that a stored value may have:
# a caller may have put an int in a float field.
_PLAIN: Final[dict[Any, frozenset[type]]] = {
    **{kind: frozenset((kind,)) for kind in (str, int, bool, bytes, dict, list, Link)},
    types.NoneType: frozenset((types.NoneType,)),
    float: frozenset((float, int)),
}


@lru_cache(maxsize=1024)
def number_text(number: int) -> str:
    """A number from 0 on as a part of a key; texts sort as their numbers do.

    >>> [number_text(number) for number in (0, 9, 10, 255)]
    ['a0', 'a9', 'b10', 'c255']
    """
    digits = str(number)
    return chr(_FIRST_LENGTH - 1 + len(digits)) + digits


@lru_cache(maxsize=1024)
def text_number(text: str) -> int:
    """The number that ``number_text`` encoded as this text; ValueError for any other text."""
    number = int(text[1:])
    if number < 0 or number_text(number) != text:
        raise ValueError(f"{text!r} is not a number in a key")
    return number


def key_texts(parts: Parts) -> Key:
    """The texts of a key: numbers encoded, texts as they are."""
    return tuple([part if type(part) is str else number_text(part) for part in parts])


# --- fields ---------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """How one field is stored."""

    #: The types that the stored value may have; None: any.
    stored: frozenset[type] | None
    #: ``load`` makes the field from the stored value, ``dump`` the reverse; None: they are equal.
    load: Callable[[Any], Any] | None = None
    dump: Callable[[Any], Any] | None = None


def _field(kind: Any) -> _Field:
    if kind is Any:
        return _Field(None)
    if kind in _PLAIN:
        return _Field(_PLAIN[kind])
    if kind is Digest:
        return _Field(_PLAIN[Link], lambda link: link.digest, Link)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union([_field(each) for each in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return _sequence(_field(arguments[0]))
    if origin is tuple:
        return _structure(tuple, [_field(each) for each in arguments], len(arguments))
    if origin is list:
        return _Field(_PLAIN[list])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_field(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, tuple):
        least = len(kind._fields) - len(kind._field_defaults)  # type: ignore[attr-defined]
        hints = type_hints(kind)
        fields = [_field(hints[name]) for name in kind._fields]  # type: ignore[attr-defined]
        return _structure(lambda values: kind(*values), fields, least)
    raise TypeError(f"a field of a row cannot be of type {kind!r}")


def _union(fields: Sequence[_Field]) -> _Field:
    stored = frozenset[type]().union(*[each.stored or () for each in fields])
    converted = [each for each in fields if each.load is not None]
    if not converted:
        return _Field(stored)
    # At most one member of a union is converted. No other member has its types, neither stored nor
    # as a field, so the type of a value decides whether to convert it.
    [(own, load, dump)] = converted
    assert own is not None
    assert load is not None
    assert dump is not None
    return _Field(
        stored,
        lambda value: load(value) if type(value) in own else value,
        lambda value: dump(value) if _is_converted(value) else value,
    )


def _is_converted(value: Any) -> bool:
    return isinstance(value, tuple | Digest) and type(value) is not Link


def _sequence(item: _Field) -> _Field:
    stored, load, dump = item

    def load_all(values: list[Any]) -> tuple[Any, ...]:
        if stored is not None and not stored.issuperset(map(type, values)):
            raise TypeError(f"a list has an item that is not {_names(stored)}")
        return tuple(values) if load is None else tuple([load(each) for each in values])

    return _Field(
        _PLAIN[list], load_all, list if dump is None else lambda values: [*map(dump, values)]
    )


def _mapping(item: _Field) -> _Field:
    if item.stored is None or item.load is None:
        return _Field(_PLAIN[dict])
    dump = item.dump
    assert dump is not None
    return _Field(
        _PLAIN[dict],
        lambda values: {name: _loaded(item, value) for name, value in values.items()},
        lambda values: {name: dump(value) for name, value in values.items()},
    )


def _structure(
    make: Callable[[Sequence[Any]], Any], fields: Sequence[_Field], least: int
) -> _Field:
    loads = [(at, field.load) for at, field in enumerate(fields) if field.load is not None]
    # The types of the items of each list that passed the check: those need no second check.
    known: set[tuple[type, ...]] = set()

    def load_all(values: list[Any]) -> Any:
        kinds = tuple(map(type, values))
        if kinds not in known:
            if not least <= len(values) <= len(fields):
                raise TypeError(f"a list has {len(values)} items, not {len(fields)}")
            for field, kind in zip(fields, kinds, strict=False):
                if field.stored is not None and kind not in field.stored:
                    raise TypeError(f"an item is {kind.__name__}, not {_names(field.stored)}")
            known.add(kinds)
        for at, load in loads:
            if at < len(values):
                values[at] = load(values[at])
        return make(values)

    def dump_all(values: tuple[Any, ...]) -> list[Any]:
        return [
            value if field.dump is None else field.dump(value)
            for field, value in zip(fields, values, strict=True)
        ]

    is_plain = all(field.dump is None for field in fields)
    return _Field(_PLAIN[list], load_all, list if is_plain else dump_all)


def _loaded(field: _Field, value: Any) -> Any:
    if field.stored is not None and type(value) not in field.stored:
        raise TypeError(f"an entry is {type(value).__name__}, not {_names(field.stored)}")
    return value if field.load is None else field.load(value)


def _names(stored: frozenset[type]) -> str:
    return " or ".join(sorted([kind.__name__ for kind in stored]))


# --- schemas --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index(Generic[R]):
    """Index rows, in a table of their own: they lead from other keys to the rows of a table.

    ``keys`` returns the index keys of a row: none, one or several. The key of the row is the end of
    each index key (``ends_with_key``), or ``owner`` derives it from the index key, or the index row
    stores it. ``owner`` returns None for the keys of another index that shares the index table.
    Unless ``unique``, rows may share an index key, which then leads to the row put last.
    """

    name: str
    parts: int
    keys: Callable[[R], Iterable[Parts]]
    ends_with_key: bool = False
    owner: Callable[[Key], Key | None] | None = None
    unique: bool = True


@dataclass(frozen=True)
class Parent(Generic[R]):
    """A row of another table that must exist for a row, and agree with it.

    ``key`` returns the key of the parent; None: this row needs no parent.
    """

    schema: Schema[Any]
    key: Callable[[R], Parts | None]
    agrees: Callable[[R, Any], bool] = lambda row, parent: True
    #: True if searches and erasures find the row only through this parent. A missing parent is then
    #: reported as a wrong index, else as an orphaned row.
    finds: bool = False


class Schema(Generic[R]):
    """The rows of one table: a NamedTuple, of which the first ``keys`` fields are the key.

    >>> class Page(NamedTuple):
    ...     person: str
    ...     number: int
    ...     text: str
    ...     expires_ms: int | None = None
    >>> pages = Schema("notes.pages", Page, 2)
    >>> pages.key(Page("anna", 1, "hello")), pages.encode(Page("anna", 1, "hello"))
    (('anna', 'a1'), ['hello'])
    """

    def __init__(
        self,
        name: str,
        row: type[R],
        keys: int,
        *,
        indexes: Sequence[Index[R]] = (),
        parents: Sequence[Parent[R]] = (),
    ) -> None:
        self.name = name
        self.row = row
        self.keys = keys
        self.key_space = KeySpace(name, keys)
        self.indexes = tuple(indexes)
        self.parents = tuple(parents)
        names, hints, defaults = _declared(row)
        first = type_hints(row)[row._fields[0]]  # type: ignore[attr-defined]
        self._inner = first if _is_named_tuple(first) else None
        self._width = len(first._fields) if self._inner is not None else 0
        self._has_record = names[-1] == "record"
        if self._has_record:
            del names[-1]
        self._numbers = [at for at in range(keys) if hints[names[at]] is int]
        self._names = names[keys:]
        self._fields = [_field(hints[name]) for name in self._names]
        self._least = len([name for name in self._names if name not in defaults])
        self._defaults = [defaults.get(name) for name in self._names]
        self._loads = [(at, one.load) for at, one in enumerate(self._fields) if one.load]
        self._dumps = [(at, one.dump) for at, one in enumerate(self._fields) if one.dump]
        self._is_single = len(self._names) == self._least == 1
        # The field types of each row that passed the check: those need no second check.
        self._known: set[tuple[type, ...] | None] = set()
        #: Makes a row from its key and stored value; CorruptionError if they do not fit the schema.
        self.decode = self._decoder()

    @property
    def tables(self) -> list[str]:
        """The names of the table and of its indexes."""
        return [self.name, *[index.name for index in self.indexes]]

    def key(self, row: R) -> Key:
        """The key of a row."""
        values = row if self._inner is None else row[0]
        if self._numbers:
            return key_texts(values[: self.keys])
        return tuple(values[: self.keys])

    def encode(self, row: R) -> Any:
        """A row as it is stored, without its key."""
        if self._inner is None:
            values = list(row[self.keys :])
        else:
            values = [*row[0][self.keys :], *row[1:]]
        if self._has_record:
            del values[-1]
        end, least = len(values), self._least
        if end > least:
            defaults = self._defaults
            while end > least and values[end - 1] == defaults[end - 1]:
                end -= 1
            del values[end:]
        for at, dump in self._dumps:
            if at < end:
                values[at] = dump(values[at])
        return values[0] if self._is_single else values

    def _decoder(self) -> Callable[[Key, Any, Record], R]:
        """``decode`` as a closure, for speed: it runs for every row that is read."""
        make: Callable[..., R] = self.row
        inner, width = self._inner, self._width
        known, loads, numbers, check = self._known, self._loads, self._numbers, self._check
        has_record, defaults = self._has_record, self._defaults
        is_single = self._is_single
        if inner is not None:
            # The first fields are those of the NamedTuple that the row extends.
            def make(*fields: Any) -> R:
                return self.row(inner(*fields[:width]), *fields[width:])

        def decode(key: Key, values: Any, record: Record) -> R:
            if is_single:
                values = [values]
            kinds = tuple(map(type, values)) if type(values) is list else None
            if kinds not in known:
                check(key, kinds)
            parts: Sequence[Any] = key
            if numbers or loads:
                try:
                    for at, load in loads:
                        if at < len(values):
                            values[at] = load(values[at])
                    if numbers:
                        parts = [*key]
                        for at in numbers:
                            parts[at] = text_number(key[at])
                except (TypeError, ValueError, LookupError) as exc:
                    raise self.damaged(key, f"a field cannot be decoded: {exc}") from exc
            if has_record:
                return make(*parts, *values, *defaults[len(values) :], record)
            return make(*parts, *values)

        return decode

    def _check(self, key: Key, kinds: tuple[type, ...] | None) -> None:
        if kinds is None or not self._least <= len(kinds) <= len(self._fields):
            raise self.damaged(key, f"it does not hold {len(self._fields)} fields")
        for name, field, kind in zip(self._names, self._fields, kinds, strict=False):
            if field.stored is not None and kind not in field.stored:
                raise self.damaged(
                    key, f"{name} is of type {kind.__name__}, not {_names(field.stored)}"
                )
        self._known.add(kinds)

    def read(self, record: Record) -> R:
        """The row of a record; CorruptionError, with what is wrong, if it holds something else."""
        return self.decode(record.key, read_value(record, self.name), record)

    def damaged(self, key: Sequence[str], what: str) -> CorruptionError:
        """The error for a row that cannot be decoded."""
        return CorruptionError(
            f"row {' / '.join(key)!r} of table {self.name} is damaged, or of a newer version: "
            f"{what}; check the store"
        )


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _declared(row: Any) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The names, types and defaults of a row's fields; a first NamedTuple counts as its fields."""
    hints, names = type_hints(row), list(row._fields)
    defaults = dict(row._field_defaults)
    inner = hints[names[0]]
    if _is_named_tuple(inner):
        names = [*inner._fields, *names[1:]]
        hints = {**type_hints(inner), **hints}
    return names, hints, defaults


def tables_of(*schemas: Schema[Any]) -> tuple[str, ...]:
    """The names of the schemas' tables and indexes, sorted, each once."""
    return tuple(sorted({name for schema in schemas for name in schema.tables}))


# --- tables ---------------------------------------------------------------------------------------


class IndexTable(Table, Generic[R]):
    """The table of an index in a store."""

    def __init__(self, store: Store, schema: Schema[R], index: Index[R]) -> None:
        super().__init__(store, index.name, index.parts)
        self.index = index
        self._schema = schema

    def keys_of(self, row: R | None) -> list[Key]:
        """The keys that lead to a row; none if there is no row."""
        return [] if row is None else [key_texts(parts) for parts in self.index.keys(row)]

    def value_of(self, key: Key) -> Any:
        """The value to store in an index row that leads to the row with this key."""
        if self.index.ends_with_key or self.index.owner is not None:
            return None
        return key[0] if len(key) == 1 else list(key)

    def owner(self, record: Record) -> Key | None:
        """The key of the row that an index row leads to; None: another index put the index row."""
        if self.index.owner is not None:
            return self.index.owner(record.key)
        if self.index.ends_with_key:
            return record.key[-self._schema.keys :]
        value = read_value(record, self.index.name)
        key = (value,) if type(value) is str else value
        if type(key) not in (tuple, list) or not all(type(part) is str for part in key):
            raise CorruptionError(
                f"row {' / '.join(record.key)!r} of index {self.index.name} holds no key; "
                "check the store"
            )
        return tuple(key)

    def leads_to(self, record: Record) -> Key:
        """As ``owner``, for an index that shares its table with no other."""
        key = self.owner(record)
        assert key is not None
        return key


class RowTable(Table, Generic[R]):
    """A table in a store whose rows have a schema.

    >>> class Page(NamedTuple):
    ...     person: str
    ...     number: int
    ...     text: str
    >>> by_text = Index("notes.by_text", 3, lambda page: [(page.text, page.person, page.number)],
    ...     ends_with_key=True)
    >>> pages = RowTable(store, Schema("notes.pages", Page, 2, indexes=[by_text]))
    >>> draft = Draft(store)
    >>> row = pages.put(draft, Page("anna", 1, "hello"))
    >>> draft.commit()
    >>> pages.get("anna", 1)
    Page(person='anna', number=1, text='hello')
    >>> [record.key for record in pages.indexes[0].scan("hello")]
    [('hello', 'anna', 'a1')]
    """

    def __init__(self, store: Store, schema: Schema[R]) -> None:
        # Table's constructor would build the key space again, which the schema has.
        check_store(store)
        self._store = store
        self.keys = schema.key_space
        self.schema = schema
        self.indexes = [IndexTable(store, schema, index) for index in schema.indexes]

    def get(self, *key: str | int) -> R | None:
        """The row of a key, or None."""
        record = self.find(*key_texts(key))
        return None if record is None else self.schema.read(record)

    def decode(self, record: Record) -> R:
        """The row of a record; CorruptionError, with what is wrong, if it holds something else."""
        return self.schema.read(record)

    def decode_found(self, record: Record | None) -> R | None:
        """The row of a record; None if there is no record."""
        return None if record is None else self.decode(record)

    def row_of(self, key: Key, stored: bytes) -> R:
        """Decode the row with this key from its stored bytes."""
        return self.decode(self.record_of(Row(self.keys.key(key), stored)))

    def rows(self, *prefix: str, before: str | None = None) -> Iterator[R]:
        """The rows that ``scan`` lists, without those removed since.

        >>> class Page(NamedTuple):
        ...     person: str
        ...     number: int
        ...     text: str
        >>> pages = RowTable(store, Schema("notes.pages", Page, 2))
        >>> draft = Draft(store)
        >>> stored = [pages.put(draft, Page("anna", number, "hello")) for number in (1, 2)]
        >>> draft.commit()
        >>> [page.number for page in pages.rows("anna")]
        [1, 2]
        """
        return self.read_each(self.scan(*prefix, before=before), self.decode)

    def indexed(self, index: IndexTable[R], *prefix: str) -> list[Record]:
        """The records to which the rows of an index lead, in the order of the index.

        Records that were removed since the index was read are left out.
        """
        keys = [index.leads_to(entry) for entry in index.scan(*prefix)]
        found: list[Record] = []
        for start in range(0, len(keys), _PAGE):
            found += filter(None, self.find_many(keys[start : start + _PAGE]))
        return found

    def put(self, draft: Draft, row: R, before: R | None = None) -> bytes:
        """Add a row and its index rows to a draft; returns the bytes stored for the row.

        ``before`` is the row that it replaces, with the same key: index rows of ``before`` that the
        new row does not have are deleted. So the caller must make ``before`` a condition of the
        draft (``Draft.expect``).
        """
        key = self.schema.key(row)
        stored = draft.put(self, key, self.schema.encode(row))
        if self.indexes:
            self._reindex(draft, key, before, row)
        return stored

    def remove(self, draft: Draft, row: R) -> None:
        """Add to a draft the deletion of a row and its index rows."""
        key = self.schema.key(row)
        draft.delete(self, key)
        self._reindex(draft, key, row, None)

    def _reindex(self, draft: Draft, key: Key, before: R | None, after: R | None) -> None:
        for index in self.indexes:
            old, new = index.keys_of(before), index.keys_of(after)
            for each in old:
                if each not in new:
                    draft.delete(index, each)
            for each in new:
                if each not in old:
                    draft.put(index, each, index.value_of(key))


def read_value(record: Record, table: str) -> Any:
    """The stored value of a record; CorruptionError if it cannot be read."""
    try:
        return record.value
    except (CorruptionError, LimitError):
        raise
    except (CasstoreError, ValueError) as exc:
        raise CorruptionError(
            f"row {' / '.join(record.key)!r} of table {table} cannot be read; check the store"
        ) from exc
