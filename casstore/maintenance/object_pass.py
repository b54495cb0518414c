"""One pass over the directory of all objects, from the newest down, with progress."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import Engine, ObjectInfo
from casstore.maintenance.progress import Progress, Step

_PAGE: Final = 1000


def newest_first(engine: Engine, phase: str, progress: Progress | None) -> Iterator[ObjectInfo]:
    """Every object, parents before children; ``progress`` is called for each page."""
    before: int | None = None
    seen = 0
    while page := engine.scan_objects(before=before, limit=_PAGE):
        yield from page
        seen += len(page)
        before = page[-1].id
        if progress is not None:
            progress(Step(phase, seen, None, "objects"))
