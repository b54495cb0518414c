"""What another saver of LangGraph has stored into a store, checked, and the source only read.

Checkpoints that the store has already are passed over, so an import that was stopped goes on where
it was when it is started again; what was written to them since is added. Objects in the state are
moved as they are spelled (``raw``): nothing that they name is imported, and no type needs to be
allowed for it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from casstore.adapters.langgraph import encoding, layout
from casstore.adapters.langgraph.layout import Channel, PendingRow, Place
from casstore.adapters.langgraph.raw import dump_raw, load_raw, open_snapshot, pack_form, pack_raw
from casstore.adapters.langgraph.threads import (
    CheckpointRow,
    Threads,
    checkpoint_row,
    row_content,
    sorted_writes,
    unpack_tasks,
)
from casstore.compat.importing import used_bytes
from casstore.errors import (
    ConditionFailedError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    UnsafePayloadError,
)
from casstore.maintenance.progress import Progress, Step
from casstore.session.records import Draft
from casstore.store import Store

# A write holds so much at the most: what stopping in between would lose.
_BATCH_BYTES: Final = 4 << 20
_BATCH_CHECKPOINTS: Final = 200
# How many checkpoints are named at a time.
_PAGE: Final = 200


class ImportReport(NamedTuple):
    """What an import did. Sizes in bytes; of the store, None if its engine does not tell."""

    #: In the source.
    checkpoints: int
    writes: int
    #: Checkpoints that were moved now; the others were in the store already.
    imported: int
    #: Checkpoints that were there already, and to which writes were added now.
    updated: int
    source_bytes: int
    store_bytes_before: int | None
    store_bytes: int | None


class FoundCheckpoint(NamedTuple):
    """A checkpoint of the source, its state in the form that ``encoding`` takes."""

    place: Place
    parent: str | None
    fields: Mapping[str, Any]
    metadata: Mapping[str, Any]
    writes: Sequence[PendingRow]


class Queries(NamedTuple):
    """How a saver's tables are asked, in the words of their database."""

    count_checkpoints: Any
    count_writes: Any
    #: Names of checkpoints behind one, at most so many, in order.
    keys: Any
    #: The writes of a checkpoint: task, path, index, channel, tag, payload.
    writes: Any
    #: Names of checkpoints that have writes and are not there themselves.
    early: Any


class SaverSource(ABC):
    """What a saver has stored, to read from, as it was at one moment.

    ``name`` is what messages call it. ``serde`` is the serialiser that it was written with, if
    that is not LangGraph's own.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[Any, Sequence[Any]], Iterator[tuple[Any, ...]]],
        queries: Queries,
        serde: SerializerProtocol | None,
    ) -> None:
        self.name = name
        self._ask = ask
        self._queries = queries
        self._serde = serde

    @abstractmethod
    def checkpoint(self, place: Place) -> FoundCheckpoint:
        """One checkpoint with its writes."""

    @abstractmethod
    def require_unchanged(self) -> None:
        """ConflictError if somebody wrote to it meanwhile, and not all was read of one moment."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """How much it takes."""

    def count_checkpoints(self) -> int:
        """How many checkpoints there are."""
        return int(next(self._ask(self._queries.count_checkpoints, ()))[0])

    def count_writes(self) -> int:
        """How many pending writes there are."""
        return int(next(self._ask(self._queries.count_writes, ()))[0])

    def places(self) -> Iterator[list[Place]]:
        """All checkpoints in order, a page at a time."""
        after = Place("", "", "")
        while page := [Place(*row) for row in self._ask(self._queries.keys, (*after, _PAGE))]:
            yield page
            after = page[-1]

    def early(self) -> Iterator[Place]:
        """Checkpoints that have writes and are not there themselves."""
        return (Place(*row) for row in self._ask(self._queries.early, ()))

    def writes(self, place: Place) -> list[PendingRow]:
        """The pending writes of a checkpoint, in stored form."""
        return [
            PendingRow(task, path, index, channel, self.encode(self.load(place, tag, payload)))
            for task, path, index, channel, tag, payload in self._ask(self._queries.writes, place)
        ]

    def encode(self, value: Any) -> Any:
        """The stored form of a value that was read."""
        if self._serde is not None:
            return encoding.Codec(self._serde).encode(value)
        return encoding.encode(open_snapshot(value), dump_raw)

    def decode(self, stored: Any) -> Any:
        """The value of a stored form."""
        load = load_raw if self._serde is None else self._serde.loads_typed
        return encoding.decode(stored, load)

    def same(self, value: Any, stored: Any) -> bool:
        """Is the stored form that of the value?"""
        return self.equal(self.decode(stored), value)

    def same_writes(self, some: Sequence[PendingRow], others: Sequence[PendingRow]) -> bool:
        """Are these the same writes, in whatever order?"""
        one, other = [sorted(each, key=_place_of_write) for each in (some, others)]
        return len(one) == len(other) and all(map(self.same_write, one, other))

    def same_write(self, one: PendingRow, other: PendingRow) -> bool:
        """Are two writes in stored form the same? A cipher spells a value anew every time."""
        if one[:-1] != other[:-1]:
            return False
        if pack_form(one.value) == pack_form(other.value):
            return True
        if self._serde is None:
            return False
        return self.equal(self.decode(one.value), self.decode(other.value))

    def equal(self, one: Any, other: Any) -> bool:
        """Are two values that were read the same?"""
        if self._serde is not None:
            return bool(one == other)
        return pack_raw(one) == pack_raw(other)

    def load(self, place: Place, tag: str, payload: bytes) -> Any:
        """Read serialised state that belongs to a checkpoint."""
        if self._serde is not None:
            return self._serde.loads_typed((tag, payload))
        if tag == "null":
            return None
        if type(tag) is str and not isinstance(payload, bytes | str):
            raise self.damaged(place, "its state is neither bytes nor text")
        if tag == "json":
            tag, payload = self._rewritten(place, payload)
        try:
            return load_raw((tag, payload))
        except UnsafePayloadError as exc:
            raise UnsafePayloadError(
                exc.name,
                f"checkpoint {place.checkpoint} of thread {place.thread!r} is in a codec that "
                "needs its serialiser; give it as serde",
            ) from exc

    def _rewritten(self, place: Place, payload: bytes | str) -> tuple[str, bytes]:
        """State that LangGraph once wrote as JSON, as it would write it today.

        Its own list says what of it may be rebuilt; it raises whatever it likes for the rest.
        """
        try:
            json.loads(payload)
        except (ValueError, RecursionError) as exc:
            raise self.damaged(place, f"its state is no JSON: {exc}") from exc
        strict = JsonPlusSerializer(allowed_msgpack_modules=None)
        try:
            value = strict.loads_typed(("json", payload))  # type: ignore[arg-type]
        except Exception as exc:
            raise UnsafePayloadError(
                "json",
                f"checkpoint {place.checkpoint} of thread {place.thread!r} holds what LangGraph "
                f"does not rebuild ({exc!s:.200}); give a serialiser that does as serde",
            ) from exc
        try:
            return strict.dumps_typed(value)
        except (TypeError, ValueError) as exc:
            raise InvalidInputError(
                f"checkpoint {place.checkpoint} of thread {place.thread!r} holds what LangGraph's "
                f"serialiser cannot encode: {exc}"
            ) from exc

    def damaged(self, place: Place, why: str) -> CorruptionError:
        """The error for a checkpoint that cannot be what it is stored as."""
        return CorruptionError(
            f"checkpoint {place.checkpoint} of thread {place.thread!r} in {self.name} is damaged: "
            f"{why}"
        )

    def require_fields(self, place: Place, fields: Any) -> None:
        """Raise CorruptionError unless a checkpoint has what every checkpoint has."""
        if type(fields) is not dict:
            raise self.damaged(place, "it is no map")
        if type(fields.get("channel_values")) is not dict:
            raise self.damaged(place, "its channel_values are no map")
        if type(fields.get("v")) not in (int, type(None)):
            raise self.damaged(place, "its version is no number")
        versions, seen = fields.get("channel_versions"), fields.get("versions_seen")
        for name, found in (("channel_versions", versions), ("versions_seen", seen)):
            if found is not None and type(found) is not dict:
                raise self.damaged(place, f"its {name} are no map")
        kinds = {type(version) for version in (versions or {}).values()}
        if not (kinds <= {str} or kinds <= {int, float}):
            raise self.damaged(place, "versions of its channels are neither texts nor numbers")
        if any(type(one) is not dict for one in (seen or {}).values()):
            raise self.damaged(place, "its versions_seen are no maps of versions")
        for names in (fields["channel_values"], versions or {}, seen or {}):
            if any(type(name) is not str for name in names):
                raise self.damaged(place, "a channel is not called by a text")

    def parse(self, place: Place, text: str | bytes, what: str) -> dict[str, Any]:
        """Read a map that a checkpoint has as JSON."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as exc:
            raise CorruptionError(f"the {what} of {place} in {self.name} is damaged") from exc
        if type(found) is not dict:
            raise CorruptionError(f"the {what} of {place} in {self.name} is none")
        return found

    def lost(self, place: Place) -> ConflictError:
        """What to say of a checkpoint that was there a moment ago."""
        return ConflictError(f"{self.name} lost checkpoint {place.checkpoint} while it was read")


def move_in(source: SaverSource, store: Store, progress: Progress | None) -> ImportReport:
    """Move all checkpoints and writes over, and compare all of them.

    ConflictError if the store has a checkpoint of the same name with other content.
    """
    before = used_bytes(store)
    total = source.count_checkpoints()
    imported, updated = _Copy(source, store, total, progress).run()
    _verify(source, Threads(store), total, progress)
    writes = source.count_writes()
    source.require_unchanged()
    sizes = source.size_bytes, before, used_bytes(store)
    return ImportReport(total, writes, imported, updated, *sizes)


class _Copy:
    """Moves what the store does not have, in writes of bounded size."""

    def __init__(
        self, source: SaverSource, store: Store, total: int, progress: Progress | None
    ) -> None:
        self._source = source
        self._threads = Threads(store)
        self._total = total
        self._progress = progress
        self._draft = Draft(store)
        self._waiting = 0
        # The channels of the checkpoint before, as read and as stored: most did not change.
        self._before: dict[str, tuple[Any, Any]] = {}
        self._group: tuple[str, str] = ("", "")

    def run(self) -> tuple[int, int]:
        """Copy everything; how many checkpoints were new, and how many have got writes."""
        done = copied = updated = 0
        for page in self._source.places():
            known = self._threads.checkpoints.find_many(page)
            for place, record in zip(page, known, strict=True):
                if record is None:
                    self._add(self._source.checkpoint(place))
                    copied += 1
                else:
                    updated += self._add_later_writes(checkpoint_row(record))
                done += 1
                if self._draft.size_bytes > _BATCH_BYTES or self._waiting >= _BATCH_CHECKPOINTS:
                    self._flush(done)
            self._flush(done)
        for place in self._source.early():
            self._add_writes(place, self._source.writes(place))
        self._flush(done)
        return copied, updated

    def _add(self, checkpoint: FoundCheckpoint) -> None:
        fields, place = checkpoint.fields, checkpoint.place
        if self._group != place[:2]:
            self._group, self._before = (place.thread, place.namespace), {}
        values = fields["channel_values"]
        channels: dict[str, Channel] = {}
        for name, version in (fields.get("channel_versions") or {}).items():
            stored = layout.pack_version(version)
            if name in values:
                channels[name] = Channel(stored, True, self._value(name, values[name]))
            else:
                channels[name] = Channel(stored, False, None)
        for name in values:
            if name not in channels:
                channels[name] = Channel(None, True, self._value(name, values[name]))
        link = self._draft.keep(
            layout.pack_checkpoint(
                {**fields, "id": fields.get("id", place.checkpoint)},
                channels,
                self._source.encode(layout.other_fields(fields)),
                self._source.encode(dict(checkpoint.metadata)),
            )
        )
        run = checkpoint.metadata.get("run_id")
        content = row_content(link, checkpoint.parent, None if run is None else str(run))
        # Not there a moment ago: whoever has put it since put the same, or will be told.
        self._draft.expect(self._threads.checkpoints, place, None)
        self._draft.put(self._threads.checkpoints, place, content)
        self._add_writes(place, checkpoint.writes)
        self._waiting += 1

    def _value(self, name: str, value: Any) -> Any:
        known = self._before.get(name)
        if known is None or not self._source.equal(known[0], value):
            known = (value, self._draft.keep_long(self._source.encode(value)))
            self._before[name] = known
        return known[1]

    def _add_later_writes(self, row: CheckpointRow) -> bool:
        """Add what was written to a checkpoint since it was moved; False if nothing was."""
        place = row.place
        if not self._add_writes(place, self._source.writes(place), row.folded_writes):
            return False
        # Only to the checkpoint that they were written to.
        if not _is_same(self._source, self._threads, row, self._source.checkpoint(place)):
            raise _other_content(place)
        self._waiting += 1
        return True

    def _add_writes(
        self, place: Place, writes: Sequence[PendingRow], folded: Sequence[PendingRow] = ()
    ) -> bool:
        """Add the writes that the store lacks; False if it lacks none.

        ConflictError if it has one that the source has not: somebody went on with it here.
        """
        rows = {record.key[3]: record for record in self._threads.writes.scan(*place)}
        there = sorted_writes(folded, unpack_tasks(rows.values()))
        wanted = {_place_of_write(each): each for each in writes}
        for each in there:
            known = wanted.pop(_place_of_write(each), None)
            if known is None or not self._source.same_write(known, each):
                raise _other_content(place)
        for task in {each.task: None for each in wanted.values()}:
            own = [each for each in writes if each.task == task]
            key = (*place, task)
            self._draft.expect(self._threads.writes, key, rows.get(task))
            self._draft.put(self._threads.writes, key, layout.pack_task(own))
        return bool(wanted)

    def _flush(self, done: int) -> None:
        try:
            self._draft.commit()
        except ConditionFailedError as exc:
            raise ConflictError(
                "checkpoints of the store were changed in the midst of it; import once more"
            ) from exc
        self._draft = Draft(self._threads.store)
        self._waiting = 0
        if self._progress is not None:
            self._progress(Step("copy", done, self._total, "checkpoints"))


def _verify(source: SaverSource, threads: Threads, total: int, progress: Progress | None) -> None:
    """Read every checkpoint back and compare it with the source."""
    done = 0
    for page in source.places():
        for place in page:
            _verify_one(source, threads, source.checkpoint(place))
        done += len(page)
        if progress is not None:
            progress(Step("verify", done, total, "checkpoints"))
    for place in source.early():
        stored = sorted_writes((), unpack_tasks(threads.writes.scan(*place)))
        if not source.same_writes(source.writes(place), stored):
            raise _other_content(place)


def _verify_one(source: SaverSource, threads: Threads, checkpoint: FoundCheckpoint) -> None:
    place = checkpoint.place
    row = threads.find(place)
    if row is None:
        raise ConflictError(f"checkpoint {place.checkpoint} was deleted while it was compared")
    if not _is_same(source, threads, row, checkpoint) or not source.same_writes(
        checkpoint.writes, threads.pending(row)
    ):
        raise _other_content(place)


def _is_same(
    source: SaverSource, threads: Threads, row: CheckpointRow, checkpoint: FoundCheckpoint
) -> bool:
    """Is it the same checkpoint, leaving aside what was written to it?"""
    fields = checkpoint.fields
    stored = threads.read([row])[0]
    channels = stored.channels
    valued = [name for name, each in channels.items() if each.has_value]
    values = dict(
        zip(valued, threads.resolve(channels[name].value for name in valued), strict=True)
    )
    return (
        row.parent == checkpoint.parent
        and set(values) == set(fields["channel_values"])
        and all(
            source.same(value, values[name]) for name, value in fields["channel_values"].items()
        )
        and {
            name: layout.unpack_version(each.version)
            for name, each in channels.items()
            if each.version is not None
        }
        == (fields.get("channel_versions") or {})
        and layout.unpack_seen(stored.value) == (fields.get("versions_seen") or {})
        and all(stored.value[name] == fields.get(name) for name in ("v", "ts"))
        and source.same(layout.other_fields(fields), stored.value["more"])
        # Metadata is JSON, and its encoding compares as equal where NaN does not.
        and pack_raw(source.decode(stored.value["meta"])) == pack_raw(dict(checkpoint.metadata))
    )


def _other_content(place: Place) -> ConflictError:
    return ConflictError(
        f"checkpoint {place.checkpoint} of thread {place.thread!r}, namespace "
        f"{place.namespace!r}, is in the store with other content; import into another store"
    )


def _place_of_write(write: PendingRow) -> tuple[str, int]:
    return write.task, write.slot
