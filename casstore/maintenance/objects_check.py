"""Checks objects: each is what was written, in canonical form, and what it links to is stored.

Objects are read by ascending id. A child's id is lower than its parent's, so when an object is
read, it is known whether all it links to is undamaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from casstore.engine import faults
from casstore.engine.faults import Checking, Examined
from casstore.engine.id_set import IdSet
from casstore.engine.protocol import Engine, StoredObject
from casstore.errors import CasstoreError, CorruptionError
from casstore.format import canonical, expansion, tree
from casstore.format.digest import Digest, Kind, check_object
from casstore.format.graph import decode_manifest, encode_manifest, open_node
from casstore.format.limits import MAX_REPEATED_BYTES
from casstore.format.node_index import decode_piece, encode_piece
from casstore.maintenance import findings as codes
from casstore.maintenance.findings import Findings, Where
from casstore.maintenance.progress import Phase, Progress
from casstore.objects.blobs import BlobReader
from casstore.objects.pieces import PieceReader

_READ_BYTES: Final = 1 << 20
# The assumed cost of a part that has no parts itself: the computed cost is not kept.
_COST_WITHOUT_PARTS: Final = 1024
# How many ids at most one fault makes count as damaged.
_MOST_TAINTED: Final = 1 << 16


class ObjectsCheck:
    """Checks objects and reports findings.

    ``content`` says for an id whether the content of the object is read; None: of no object.
    ``whole``: also what values cost to read is checked, which takes the content of every object.
    """

    def __init__(
        self,
        engine: Engine,
        checking: Checking,
        found: Findings,
        content: Callable[[int], bool] | None,
        *,
        whole: bool,
    ) -> None:
        self._engine = engine
        self._checking = checking
        self._found = found
        self._content = content
        self._whole = whole
        self._start = 0
        self._named = IdSet()
        # The ids of objects that are damaged or missing, or link to one that is.
        self._tainted = IdSet()
        self.any_tainted = False
        # The memory that a reader needs to build an object, by id, for objects that have parts;
        # and the sum over all objects, each built once.
        self._costs: dict[int, int] = {}
        self._cost_once = 0
        #: How many objects were checked, and the content of how many.
        self.objects = self.contents = 0
        #: The highest id of an object that was checked.
        self.highest = 0

    def is_tainted(self, object_id: int) -> bool:
        """Whether an object is damaged or missing, or links to one that is."""
        return object_id in self._tainted

    def run(self, start: int, progress: Progress | None) -> None:
        """Check the objects with ids above ``start``; earlier checks found the others undamaged."""
        self._start = start
        after: int | None = start
        report = Phase(progress, "objects", "objects")
        while after is not None:
            run = self._checking.examine(after=after, content=self._content)
            for fault in run.faults:
                self._found.add_fault(fault, None)
                if fault.first_id:
                    # A damaged key may claim any number of ids: take only the last, to bound time
                    # and memory.
                    self._taint(range(fault.first_id, fault.last_id + 1)[-_MOST_TAINTED:])
            for one in run.objects:
                if one.named:
                    self._check_object(one)
            after = run.after
            report(self.objects)

    def _taint(self, ids: Iterable[int]) -> None:
        for object_id in ids:
            self._tainted.add(object_id)
            self.any_tainted = True

    def _check_object(self, one: Examined) -> None:
        self.objects += 1
        self._named.add(one.id)
        self.highest = max(self.highest, one.id)
        where = Where(digest=Digest(one.digest))
        sound = True
        for child in one.children:
            if not 0 < child < one.id:
                sound = False
                what = (
                    f"object {one.digest.hex()} links to id {child}, which is not below its own id "
                    f"{one.id}"
                )
                self._found.add(codes.LINK_ORDER, what, where)
            elif child <= self._start:
                # An earlier check found the child undamaged; only look whether it is still stored.
                sound = self._child_is_there(one, child) and sound
            elif child in self._tainted:
                sound = False
            elif child not in self._named:
                sound = self._child_is_there(one, child) and sound
        if one.fault is not None and self._is_still_there(one):
            sound = False
            self._found.add_fault(one.fault, None)
        elif one.item is not None:
            self.contents += 1
            sound = self._check_content(one, where) and sound
        if not sound:
            self._taint([one.id])

    def _is_still_there(self, one: Examined) -> bool:
        return self._checking.find_ids([one.digest])[0] == one.id

    def _child_is_there(self, one: Examined, child: int) -> bool:
        """False, with a finding, if a child is missing while its parent is stored.

        Reads both in one fresh snapshot: gc may have removed both since the parent was read.
        """
        own, below = self._checking.find_names([one.id, child])
        if below is not None or own != one.digest:
            return True
        what = f"object {one.digest.hex()} links to id {child}, which is not in the index"
        self._found.add(codes.OBJECT_MISSING, what, Where(digest=Digest(one.digest)))
        self._taint([child])
        return False

    def _check_content(self, one: Examined, where: Where) -> bool:
        assert one.item is not None
        try:
            _prove_content(self._engine, one.digest, one.item)
        except CorruptionError as exc:
            if not self._is_still_there(one):
                return True
            self._found.add(faults.OBJECT_DAMAGED, str(exc), where)
            return False
        except CasstoreError as exc:
            self._found.add(codes.OBJECT_MALFORMED, str(exc), where)
            return False
        try:
            links = _links_of(one.digest, one.item.kind, one.item.data)
        except CasstoreError as exc:
            self._found.add(codes.OBJECT_MALFORMED, str(exc), where)
            return False
        if tuple(links) != one.links:
            what = f"object {one.digest.hex()} has {len(links)} links, its slab lists others"
            self._found.add(codes.LINKS_DIFFER, what, where)
            return False
        if self._whole:
            self._check_expansion(one, where)
        return True

    def _check_expansion(self, one: Examined, where: Where) -> None:
        """Report a value that no reader builds, unless a part of it was reported."""
        assert one.item is not None
        own, parts = expansion.own_cost(one.item.kind, one.item.data)
        self._cost_once += own
        if not parts:
            return
        ids = dict(zip(one.links, one.children, strict=True))
        below = [self._costs.get(ids[part], _COST_WITHOUT_PARTS) for part in parts]
        cost = self._costs[one.id] = own + sum(below)
        limit = self._cost_once + MAX_REPEATED_BYTES
        if cost > limit and max(below) <= limit:
            what = (
                f"object {one.digest.hex()} expands to about {cost:,} bytes of memory, because "
                "parts of it repeat"
            )
            self._found.add(codes.VALUE_EXPANDS, what, where)


def _links_of(digest: bytes, kind: int, data: bytes) -> list[bytes]:
    """The links in an object; CasstoreError if it is not in the canonical form of its kind."""
    if kind == Kind.BLOB:
        return []
    if kind in (Kind.ROPE, Kind.CHUNKS, Kind.LIST, Kind.MAP):
        body = tree.open_rope(data) if kind == Kind.ROPE else data
        shape = Kind.CHUNKS if kind == Kind.ROPE else kind
        branch = tree.decode_branch(shape, body)
        if tree.encode_branch(shape, branch.level, branch.children()) != body:
            raise CorruptionError(f"branch {digest.hex()} is not in canonical form")
        return branch.digests
    if kind == Kind.MANIFEST:
        manifest = decode_manifest(digest, data)
        encoded, links = encode_manifest(manifest)
        if encoded != data:
            raise CorruptionError(f"manifest {digest.hex()} is not in canonical form")
        return links
    if kind == Kind.INDEX:
        encoded, links = encode_piece(decode_piece(digest, data))
        if encoded != data:
            raise CorruptionError(f"part {digest.hex()} of a node index is not in canonical form")
        return links
    if kind == Kind.NODE:
        opened, links_beside = open_node(digest, data)
        parent = opened.header.parent
        return [*([] if parent is None else [parent]), *[name for _, name in links_beside]]
    # ``inspect`` accepts only the canonical form.
    return [name for _, name in canonical.inspect(data)[1]]


def _prove_content(engine: Engine, digest: bytes, item: StoredObject) -> None:
    """Compare an object with its digest, a rope by reading all its content; CorruptionError."""
    check_object(digest, item.kind, item.data)
    if item.kind == Kind.ROPE:
        with BlobReader(PieceReader(engine), digest, item) as content:
            while content.read(_READ_BYTES):
                continue
