"""Imports a bundle, the file that ``casstore export`` writes, with the report of all imports.

It does not use ``importing.run``, which compares each unit with the store before and after it is
written. ``import_session`` proves the whole file and publishes the session in one transaction, so
this would only prove the file three times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from casstore.compat.importing import (
    IMPORTED,
    UNCHANGED,
    UPDATED,
    ImportedSession,
    ImportReport,
    PartReport,
    used_bytes,
)
from casstore.engine.files import path_text
from casstore.maintenance.import_ import FAST_FORWARD, REFUSE, ImportOutcome, import_session
from casstore.maintenance.progress import Progress
from casstore.store import Store, check_store

_OUTCOMES = {
    ImportOutcome.CREATED: IMPORTED,
    ImportOutcome.FORWARDED: UPDATED,
    ImportOutcome.UNCHANGED: UNCHANGED,
}


def import_bundle(
    store: Store,
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    subjects: Iterable[str] = (),
    fast_forward: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the session of a bundle; see ``maintenance.import_.import_session``.

    >>> from casstore.maintenance.export import export_session
    >>> exported = export_session(store, "s", place / "s.bundle")
    >>> [import_bundle(other, place / "s.bundle").sessions[0].outcome for _ in range(2)]
    ['imported', 'unchanged']
    """
    check_store(store)
    before = used_bytes(store)
    file = path_text(source)
    report = import_session(
        store,
        file,
        name=name,
        subjects=subjects,
        on_conflict=FAST_FORWARD if fast_forward else REFUSE,
        dry_run=dry_run,
        progress=progress,
    )
    return ImportReport(
        kind="bundle",
        source=file,
        dry_run=dry_run,
        parts=(
            PartReport("revisions", report.bundled_revisions, report.revisions),
            PartReport("objects", report.objects, report.new_objects),
        ),
        sessions=(ImportedSession(report.session, _OUTCOMES[report.outcome], file),),
        notes=(),
        source_bytes=os.stat(file).st_size,
        store_bytes_before=before,
        store_bytes=used_bytes(store),
    )
