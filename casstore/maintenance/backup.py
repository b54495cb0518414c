"""``backup``: creates a second store with all that the first has at one moment, or updates it.

If the engine can copy its files, a new backup is a copy of them. New backups of other engines, and
all updates, are made by ``copy``, object by object.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from casstore.engine.files import TAKEN, part_directory, storage_error
from casstore.engine.protocol import HotCopying
from casstore.errors import InvalidInputError, TargetExistsError
from casstore.maintenance.copy import CopyReport, copy
from casstore.maintenance.files import require_directory
from casstore.maintenance.progress import Phase, Progress
from casstore.session.arguments import check_flag
from casstore.store import Store, check_store
from casstore.store import open as open_store


class BackupReport(NamedTuple):
    """What a backup did.

    Attributes:
        updated: true: an earlier backup was updated
        objects: objects copied
        size_bytes: the size of the new file; of an update, of the objects copied, uncompressed
    """

    updated: bool
    objects: int
    size_bytes: int


def backup(
    store: Store,
    target_path: str | os.PathLike[str],
    *,
    update: bool = False,
    replace: bool = False,
    compact: bool = False,
    progress: Progress | None = None,
) -> BackupReport:
    """Make ``target_path`` a store with everything that was acknowledged before the call.

    The store may be in use in any process. The backup appears under its name when it is
    complete, verified and on the disk. ``compact`` leaves free space out. TargetExistsError if the
    target exists, unless ``replace`` puts the new backup in its place at once, or ``update``
    mirrors the store in it: only what the target lacks is copied, session by session, and what the
    store no longer has is removed from it. SessionDivergedError if the target is not an earlier
    state of the store.

    >>> report = backup(store, place / "saved")
    >>> result = session.commit(Commit(append=[NodeDraft("why", "why left?")]))
    >>> backup(store, place / "saved", update=True).updated
    True
    >>> with casstore.open(place / "saved") as saved:
    ...     saved.session("s").head().leaf
    'why'
    """
    check_store(store)
    for name, flag in (("update", update), ("replace", replace), ("compact", compact)):
        check_flag(flag, name)
    target = os.path.abspath(
        require_directory(target_path, "backup", "use casstore copy to copy all of it")
    )
    if update and (replace or compact):
        raise InvalidInputError("update cannot be combined with replace or compact")
    if update and os.path.lexists(target):
        return _update(store, target, progress)
    engine = store.engine
    if isinstance(engine, HotCopying):
        report = Phase(progress, "copy", "bytes")
        done = engine.copy_to(target, compact=compact, replace=replace, progress=report)
        return BackupReport(False, done.objects, done.size_bytes)
    if replace:
        raise InvalidInputError(
            "replace: this engine cannot replace a backup; choose a new target_path"
        )
    return _build(store, target, progress)


def _update(store: Store, target: str, progress: Progress | None) -> BackupReport:
    with open_store(target, create=False) as other:
        done: CopyReport = copy(store, other, mirror=True, progress=progress)
        other.engine.flush()
    return BackupReport(True, done.new_objects, done.object_bytes)


def _build(store: Store, target: str, progress: Progress | None) -> BackupReport:
    """Copy a store of any engine into a new directory, object by object."""
    if os.path.lexists(target):
        raise TargetExistsError(target)
    with part_directory(target) as part:
        with open_store(part.path) as other:
            done = copy(store, other, progress=progress)
            other.engine.flush()
        try:
            found = os.scandir(part.path)
            size_bytes = sum([item.stat().st_size for item in found if item.is_file()])
            part.publish()
        except OSError as exc:
            if exc.errno in TAKEN:
                raise TargetExistsError(target) from exc
            raise storage_error(f"cannot create {target}", exc) from exc
    return BackupReport(False, done.new_objects, size_bytes)
