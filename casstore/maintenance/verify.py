"""Verifies a bundle without a store: recomputes every digest, follows every link, reads every row.

One pass over the file keeps a few numbers and the offset of each object in memory, about 400 bytes.
Objects are read again to verify ropes and the graphs of revisions, which take more than one object.
``BundleLimits`` bounds the memory and the bytes read (P7).
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.files import path_text
from casstore.engine.protocol import Engine, NewObject, StoredObject
from casstore.errors import (
    BundleError,
    BundleLimitError,
    CorruptionError,
    ForeignBundleError,
    InvalidInputError,
    ObjectsMissingError,
)
from casstore.format import bundle as layout
from casstore.format import closure
from casstore.format.closure import BlobFact, Fact, ManifestFact, NodeFact, ValueFact
from casstore.format.digest import KIND_NAMES, Digest, Kind, check_object, digest_of, plain_hash
from casstore.format.expansion import Expansion
from casstore.format.graph import Manifest
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_REPEATED_BYTES
from casstore.maintenance.bundle_file import BundleBlock, BundleReader, ObjectPlace
from casstore.maintenance.graph_proof import GraphProof
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.transfer import rows as session_rows
from casstore.maintenance.transfer.rows import SessionRows
from casstore.objects import graph, values
from casstore.objects.blobs import BlobReader
from casstore.objects.pieces import PieceReader
from casstore.session import checkpoint
from casstore.session.arguments import check_count, check_kind
from casstore.session.state import HeadRow

_READ_BYTES: Final = 1 << 20
_MIN_STEPS: Final = 1 << 20
_STEPS_PER_OBJECT: Final = 8
# How many pieces of values that the file leaves out are read from the store to measure what the
# values cost; this takes a fraction of a second. Reading a value is bounded in any case.
_MEASURED_OUTSIDE: Final = 20_000
#: How many missing digests an error names.
_MAX_NAMED: Final = 10_000


class BundleLimits(NamedTuple):
    """Limits on what reading one bundle may cost. Bundles that casstore wrote stay far below."""

    max_objects: int = 4_000_000
    max_rows: int = 1_000_000
    #: All objects together, inflated.
    max_object_bytes: int = 1 << 40
    #: Bytes that are read again to prove ropes and graphs.
    max_work_bytes: int = 1 << 36
    #: Memory for the shared parts of one value, when each is repeated wherever it occurs.
    max_repeated_bytes: int = MAX_REPEATED_BYTES


DEFAULT_LIMITS: Final = BundleLimits()


class VerifyReport(NamedTuple):
    """What ``verify_bundle`` found in a valid bundle; the first fields are as in ``ExportReport``.

    Attributes:
        left_out: objects that a thin bundle leaves out
        unproven: parts that only the store that has the rest can verify
    """

    session: str
    revisions: int
    objects: int
    object_bytes: int
    size_bytes: int
    thin: bool
    left_out: int = 0
    unproven: int = 0


class _PlacedFact(NamedTuple):
    fact: Fact
    place: ObjectPlace


class FileObjects(PieceReader):
    """Reads the objects of a bundle; others from ``outside``, a store, if it is given."""

    __slots__ = ("_outside", "_reader", "known")

    def __init__(self, reader: BundleReader, outside: PieceReader | None) -> None:
        # ``PieceReader`` uses its engine only in ``find_many``, which this class overrides.
        no_engine: Any = None
        super().__init__(no_engine if outside is None else outside.engine)
        self._reader = reader
        self._outside = outside
        self.known: dict[bytes, _PlacedFact] = {}

    def find_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects; those of the file were proven when they were first read."""
        found: list[StoredObject | None] = []
        for digest in digests:
            known = self.known.get(digest)
            if known is not None:
                item = layout.object_at(self._reader.fetch(known.place), known.place.at)
                found.append(StoredObject(item.kind, item.data))
            elif self._outside is not None:
                found += self._outside.find_many((digest,))
            else:
                found.append(None)
        self.pieces_read += len(found)
        return found


class Proof:
    """The verification of one bundle."""

    def __init__(
        self,
        reader: BundleReader,
        limits: BundleLimits,
        outside: Engine | None,
        progress: Progress | None,
    ) -> None:
        self._reader = reader
        check_kind(limits, "limits", BundleLimits)
        for name, limit in limits._asdict().items():
            check_count(limit, name)
        self._limits = limits
        self._outside = None if outside is None else PieceReader(outside)
        self._report = Phase(progress, "verify", "bytes")
        self.objects = FileObjects(reader, self._outside)
        # The objects that nothing has linked to so far, each with the offset of its block.
        self._loose: dict[bytes, int] = {}
        self._left_out: dict[bytes, Fact | None] = {}
        self._lacking: dict[bytes, None] = {}
        self._unproven = 0
        # The hash of each rope's encoded bytes, by the digest that its content proved.
        self._ropes: dict[bytes, bytes] = {}
        self._object_bytes = 0
        # The memory that a reader needs for all objects, each built once; and how many of the
        # objects that the file leaves out may still be read to measure them.
        self._cost_once = 0
        self._outside_left = _MEASURED_OUTSIDE
        self._raw_rows: list[list[Any]] = []
        self._rows_at = 0
        self.rows: SessionRows
        #: The nodes that the head hides.
        self.hidden: set[bytes] = set()
        reader.allow(limits.max_work_bytes)

    @property
    def thin(self) -> bool:
        """Whether the file leaves out objects."""
        return self._reader.header is not None and self._reader.header.thin

    def run(self) -> VerifyReport:
        """Verify the whole file; raises at the first error."""
        reader = self._reader
        for block in reader.blocks():
            if reader.header is not None and reader.header.kind != layout.SESSION:
                raise ForeignBundleError(
                    f"{reader.path} is a bundle of a {reader.header.kind!r:.40}, not of a session"
                )
            if block.type == layout.OBJECTS:
                self._take_objects(block)
            else:
                self._take_rows(block)
            self._report(block.offset + layout.BLOCK_HEADER_BYTES, reader.size_bytes)
        totals = reader.totals
        assert totals is not None
        counted = (len(self.objects.known), self._object_bytes, len(self._raw_rows))
        if totals[:3] != counted:
            raise reader.fail(
                reader.size_bytes,
                f"the file has {counted} objects, bytes and rows, its trailer says {totals[:3]}",
            )
        if self._lacking:
            raise ObjectsMissingError(reader.path, list(self._lacking))
        try:
            self.rows = session_rows.decode(self._raw_rows)
            self._check_rows()
            if not self.thin or self._outside is not None:
                self._check_graphs()
        except BundleLimitError:
            raise
        except (CorruptionError, InvalidInputError) as exc:
            raise self._failed(self._rows_at, exc) from exc
        return VerifyReport(
            self.rows.session,
            len(self.rows.revisions),
            len(self.objects.known),
            self._object_bytes,
            reader.size_bytes,
            self.thin,
            len(self._left_out),
            self._unproven,
        )

    def _failed(self, offset: int, exc: Exception) -> BundleError:
        return exc if isinstance(exc, BundleError) else self._reader.fail(offset, exc)

    def _require_within(self, limit: str, number: int, what: str) -> None:
        allowed = getattr(self._limits, limit)
        if number > allowed:
            raise BundleLimitError(
                f"{self._reader.path} {what.format(allowed)}; raise {limit} to read it"
            )

    # --- objects ------------------------------------------------------------------------------

    def has_proven(self, item: NewObject) -> bool:
        """Was this object verified on reading? A rope's digest does not cover its own bytes."""
        if item.kind == Kind.ROPE:
            return self._ropes.get(item.digest) == plain_hash(item.data)
        return item.digest in self.objects.known

    def _take_objects(self, block: BundleBlock) -> None:
        known = self.objects.known
        for packed in self._reader.objects(block):
            count = len(known) + len(self._left_out) + 1
            self._require_within("max_objects", count, "has more than {} objects")
            self._object_bytes += len(packed.data)
            more_bytes = "inflates to more than {} bytes"
            self._require_within("max_object_bytes", self._object_bytes, more_bytes)
            try:
                self._take_object(block.offset, packed)
            except BundleLimitError:
                raise
            except (CorruptionError, InvalidInputError) as exc:
                raise self._failed(block.offset, exc) from exc

    def _take_object(self, offset: int, packed: layout.PackedObject) -> None:
        kind, data = packed.kind, packed.data
        if kind not in KIND_NAMES:
            raise CorruptionError(f"an object of the unknown kind {kind}")
        name = digest_of(kind, data) if packed.name is None else packed.name
        if name in self.objects.known:
            raise CorruptionError(f"object {name.hex()} comes twice")
        if kind == Kind.ROPE:
            check_object(name, kind, data)
        fact = closure.examine(name, kind, data, self._known)
        if isinstance(fact, ValueFact | NodeFact | ManifestFact):
            self._charge_expansion(name, fact.cost)
        if kind == Kind.ROPE:
            fact = self._prove_rope(name, data, fact)
            self._ropes[name] = plain_hash(data)
        self.objects.known[name] = _PlacedFact(fact, ObjectPlace(offset, packed.at))
        self._loose[name] = offset

    def _charge_expansion(self, name: bytes, cost: Expansion) -> None:
        """BundleLimitError if an object's repeated parts take more memory than the limit.

        The limit is on the memory beyond that of all objects so far, each built once.
        """
        self._cost_once += cost.once
        limit = self._limits.max_repeated_bytes
        if cost.everywhere - self._cost_once > limit:
            raise BundleLimitError(
                f"{self._reader.path}: shared parts of object {name.hex()} repeat until they take "
                f"about {cost.everywhere - self._cost_once:,} bytes of memory (at most {limit:,}); "
                "raise max_repeated_bytes to read it"
            )

    def _known(self, digest: bytes) -> Fact | None:
        known = self.objects.known.get(digest)
        if known is not None:
            self._loose.pop(digest, None)
            return known.fact
        if not self.thin:
            raise CorruptionError(f"object {digest.hex()} does not come before the link to it")
        if digest not in self._left_out:
            self._left_out[digest] = self._look_outside(digest)
        return self._left_out[digest]

    def _look_outside(self, digest: bytes) -> Fact | None:
        """The fact of an object that the file leaves out, from the store; None without it."""
        if self._outside is None:
            return None
        item = self._outside.find_many((digest,))[0]
        if item is None:
            if len(self._lacking) < _MAX_NAMED:
                self._lacking[digest] = None
            return None
        # The objects that it links to are in the store as well (P3).
        fact = closure.examine(digest, item.kind, item.data, lambda below: None)
        if isinstance(fact, ValueFact):
            return fact._replace(cost=self._cost_outside(digest))
        return fact

    def _cost_outside(self, digest: bytes) -> Expansion:
        """The cost of a value in the store, measured in at most ``_outside_left`` of its parts."""
        assert self._outside is not None
        before = self._outside.pieces_read
        cost = values.measure(self._outside, [digest], max(1, self._outside_left))
        self._outside_left -= self._outside.pieces_read - before
        return cost

    def _prove_rope(self, name: bytes, data: bytes, fact: Fact) -> Fact:
        """Compare a rope's content with its digest, by reading all of it."""
        if self._left_out and self._outside is None:
            self._unproven += 1
            return fact
        if self._lacking:
            return fact
        content = BlobReader(self.objects, name, StoredObject(Kind.ROPE, data))
        decoder = codecs.getincrementaldecoder("utf-8")()
        is_text = True
        while True:
            part = content.read(_READ_BYTES) or b""
            self._reader.charge(len(part))
            if is_text:
                try:
                    decoder.decode(part, final=not part)
                except UnicodeDecodeError:
                    is_text = False
            if not part:
                return BlobFact(content.size_bytes, is_text)

    # --- rows ---------------------------------------------------------------------------------

    def _take_rows(self, block: BundleBlock) -> None:
        if not self._raw_rows:
            self._rows_at = block.offset
        self._raw_rows += self._reader.rows(block)
        self._require_within("max_rows", len(self._raw_rows), "has more than {} rows")

    def _check_rows(self) -> None:
        """Check that rows name objects of the right kind, and that a row reaches every object."""
        for row in self.rows.revisions:
            if not isinstance(self._known(row.manifest), ManifestFact | None):
                raise CorruptionError(f"the manifest of revision {row.revision} is not a manifest")
            if row.hidden is not None and not _is_map(self._known(row.hidden)):
                raise CorruptionError(
                    f"the object with the hidden nodes of revision {row.revision} is not a map"
                )
        for one in self.rows.attachments:
            if one.digest is not None and not isinstance(
                self._known(bytes(one.digest)), BlobFact | None
            ):
                raise CorruptionError(f"the attachment {one.id!r} is not a blob")
        if self._lacking:
            raise ObjectsMissingError(self._reader.path, list(self._lacking))
        if self._loose:
            name, offset = next(iter(self._loose.items()))
            raise self._reader.fail(offset, f"no row or object links to object {name.hex()}")

    def _check_graphs(self) -> None:
        steps = max(_MIN_STEPS, _STEPS_PER_OBJECT * len(self.objects.known))
        proof = GraphProof(self.objects, max_steps=steps)
        checked: set[bytes] = set()
        for row in self.rows.revisions:
            manifest = graph.read_manifest(self.objects, row.manifest)
            if manifest.components.data not in checked:
                checkpoint.check_fields(self.objects, manifest)
                checked.add(manifest.components.data)
            proof.prove(row.manifest, manifest)
            self._check_receipt(row, manifest)
        hidden = self.rows.revisions[-1].hidden
        if hidden is not None:
            self.hidden = self._hidden_nodes(hidden)

    def _check_receipt(self, row: HeadRow, manifest: Manifest) -> None:
        receipt = None if row.turn is None else self.rows.receipts.get(row.turn)
        if receipt is not None and receipt.first + receipt.node_count > manifest.nodes:
            raise CorruptionError(
                f"the receipt of the turn of revision {row.revision} has more nodes than that"
            )

    def _hidden_nodes(self, digest: bytes) -> set[bytes]:
        """The digests of the nodes that the head hides, from the map of these to their ids."""
        stored = self.objects.follow((digest,))[0]
        found = values.read_value(self.objects, digest, stored, max_bytes=DEFAULT_MAX_BYTES)
        if type(found) is not dict or any(type(node_id) is not str for node_id in found.values()):
            raise CorruptionError(f"{digest.hex()} is not a map of hidden nodes")
        return {bytes(Digest.from_hex(name)) for name in found}


def _is_map(fact: Fact | None) -> bool:
    return fact is None or (isinstance(fact, ValueFact) and fact.shape == closure.MAP)


def new_object(packed: layout.PackedObject) -> NewObject:
    """An object of a verified bundle in the form that ``Write`` takes."""
    name = digest_of(packed.kind, packed.data) if packed.name is None else packed.name
    return NewObject(name, packed.kind, packed.data, closure.links_of(packed.kind, packed.data))


def verify_bundle(
    source_file: str | os.PathLike[str],
    *,
    limits: BundleLimits = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a bundle without any store, or raise.

    BundleError names the offset of the error. ForeignBundleError: the file is not a bundle, or one
    of another version. BundleLimitError: reading it takes more than ``limits`` allows.

    >>> from casstore.maintenance.export import export_session
    >>> exported = export_session(store, "s", place / "s.bundle")
    >>> report = verify_bundle(place / "s.bundle")
    >>> report.session, report.revisions, report.thin
    ('s', 2, False)
    """
    with BundleReader(path_text(source_file)) as reader:
        return Proof(reader, limits, None, progress).run()
