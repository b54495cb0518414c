"""Sending objects to a store or a file: only those that it lacks, children before parents.

``Sender`` walks down from the digests it is given and stops at objects that the target has: a
target that has an object has all that the object links to (P3). Its memory holds the path down and
one batch of siblings on each level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.protocol import Engine, NewObject, Write
from casstore.format.closure import links_of
from casstore.maintenance.progress import Phase, Progress
from casstore.objects.pieces import PieceReader

_BATCH: Final = 64
# One write of a ``StoreTarget``: enough that the cost of a flush does not count.
_WRITE_BYTES: Final = 1 << 20
_WRITE_OBJECTS: Final = 1024

#: Returns those of the digests that the target lacks, in order, each once.
Lacking = Callable[[Sequence[bytes]], Sequence[bytes]]


class _Frame(NamedTuple):
    """Siblings that wait until all objects that they link to were sent."""

    items: list[NewObject]
    #: The digests that they link to, in batches.
    below: list[list[bytes]]


class Sender:
    """Reads objects, which proves them, and passes those that are lacking to ``take``."""

    def __init__(
        self,
        reader: PieceReader,
        lacking: Lacking,
        take: Callable[[NewObject], None],
        progress: Progress | None = None,
    ) -> None:
        self._reader = reader
        self._lacking = lacking
        self._take = take
        self._report = Phase(progress, "send", "objects")
        self.objects = 0
        self.object_bytes = 0

    def send(self, names: Iterable[bytes]) -> None:
        """Send these objects and all that they link to, as far as the target lacks them.

        Walks are shortest if an object comes after those that it links to.
        ObjectNotFoundError if the source lacks one of them, for example because gc removed it.
        """
        ahead = iter(names)
        while batch := list(islice(ahead, _BATCH)):
            self._send(batch)

    def _send(self, names: list[bytes]) -> None:
        stack = [self._open(names)]
        while stack:
            frame = stack[-1]
            if frame.below:
                # An object that waits in this frame may also be linked to from further down. Then
                # it is sent there, and the second ``lacking`` leaves it out here.
                found = self._open(frame.below.pop())
                if found.items:
                    stack.append(found)
                continue
            stack.pop()
            left = set(self._lacking([item.digest for item in frame.items]))
            for item in frame.items:
                if item.digest in left:
                    self._take(item)
                    self.objects += 1
                    self.object_bytes += len(item.data)
            self._report(self.objects)

    def _open(self, names: list[bytes]) -> _Frame:
        wanted = self._lacking(names)
        items: list[NewObject] = []
        below: dict[bytes, None] = {}
        earlier: set[bytes] = set()
        for name, found in zip(wanted, self._reader.get_many(wanted), strict=True):
            links = links_of(found.kind, found.data)
            items.append(NewObject(name, found.kind, found.data, links))
            # Siblings that come earlier are sent before this one.
            below.update(dict.fromkeys(link for link in links if link not in earlier))
            earlier.add(name)
        # Reversed, because ``_send`` pops from the end.
        ahead = list(below)
        batches = [ahead[start : start + _BATCH] for start in range(0, len(ahead), _BATCH)]
        return _Frame(items, batches[::-1])


class StoreTarget:
    """An engine that objects are sent to, written in batches."""

    def __init__(self, engine: Engine, written: Callable[[int], None] | None = None) -> None:
        self._engine = engine
        #: Called with the number of objects written so far.
        self._on_write = written
        self._waiting: dict[bytes, NewObject] = {}
        self._waiting_bytes = 0
        self._written = 0
        #: Objects that the engine did not have.
        self.new_objects = 0

    def lacking(self, names: Sequence[bytes]) -> list[bytes]:
        """Those that are neither stored nor waiting to be written."""
        ahead = [name for name in names if name not in self._waiting]
        return self._engine.missing(ahead) if ahead else []

    def take(self, item: NewObject) -> None:
        """Take an object; what it links to was taken before, or is stored."""
        self._waiting[item.digest] = item
        self._waiting_bytes += len(item.data)
        if self._waiting_bytes >= _WRITE_BYTES or len(self._waiting) >= _WRITE_OBJECTS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting objects. Until a row names them, gc's grace period keeps them."""
        waiting, self._waiting = self._waiting, {}
        self._waiting_bytes = 0
        if waiting:
            # If gc removed an object that they link to, this raises. They are not kept for a retry:
            # its ``lacking`` returns all of them again.
            done = self._engine.write(Write(objects=list(waiting.values())))
            self.new_objects += done.new_objects
            self._written += len(waiting)
            if self._on_write is not None:
                self._on_write(self._written)


def reached_from(reader: PieceReader, roots: Iterable[bytes]) -> set[bytes]:
    """The digests of everything that is reached from those of ``roots`` that are stored."""
    reached: set[bytes] = set()
    ahead = list(roots)
    while ahead:
        batch = [name for name in dict.fromkeys(ahead[-_BATCH:]) if name not in reached]
        del ahead[-_BATCH:]
        for name, item in zip(batch, reader.find_many(batch), strict=True):
            if item is not None:
                reached.add(name)
                ahead += [link for link in links_of(item.kind, item.data) if link not in reached]
    return reached
