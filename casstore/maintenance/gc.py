"""gc: decide what is unreachable, take its name away, and give its bytes back.

Marking and sweeping are one transaction (``engine.lmdb.collection``): safe beside readers
and writers in any process; writers wait while it runs. Bytes that lost their names go when
their slabs are packed, which happens in short steps afterwards.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from casstore.engine.protocol import MAX_STAMP_MS, Collecting
from casstore.errors import InvalidInputError
from casstore.maintenance.roots import find_roots
from casstore.store import Store

# Long enough for a blob to be put and then committed, whatever happens in between.
DEFAULT_GRACE_MS: Final = 3_600_000


class GcReport(NamedTuple):
    """What a collection did, or would do if it was a dry run."""

    dry_run: bool
    #: Distinct digests that rows name.
    roots: int
    objects_kept: int
    objects_swept: int
    #: As they lie in slabs before compression, without their links.
    bytes_kept: int
    bytes_swept: int
    #: What the slabs take less in the file, after packing.
    slab_bytes_freed: int


def collect(store: Store, *, grace_ms: int = DEFAULT_GRACE_MS, dry_run: bool = False) -> GcReport:
    """Give back what no session, revision, pin, queued work or attachment reaches.

    What was stored within ``grace_ms`` stays, with all it links to. With ``dry_run``
    nothing is changed. CorruptionError, and nothing is collected, if a row or a link is
    damaged or leads nowhere.
    """
    engine = store.engine
    if not isinstance(engine, Collecting):
        raise InvalidInputError("the engine of this store does not collect")
    if type(grace_ms) is not int or not 0 <= grace_ms <= MAX_STAMP_MS:
        raise InvalidInputError(f"a grace of 0 ms or more, not {grace_ms!r}")
    found = engine.collect(
        lambda scan: find_roots(scan, store.engine.now_ms()), grace_ms=grace_ms, dry_run=dry_run
    )
    freed = 0
    if found.objects_swept and not dry_run:
        packed = engine.pack()
        freed = packed.bytes_before - packed.bytes_after
    return GcReport(dry_run, *found, freed)
