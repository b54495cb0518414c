"""Writes a session as one HTML file, which opens from disk, without scripts or other files.

The file has the whole path, without hidden nodes, the branches and forks, and the state. It is
written page by page to a temporary file, which replaces the target when it is complete.
With patterns to redact, every text is read whole and redacted before it is cut or escaped, so that
no part of a match stays; images and bytes are left out then, because patterns cannot look into
them.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from markupsafe import Markup, escape

from casstore.cli.payloads import Block
from casstore.errors import CasstoreError
from casstore.maintenance.progress import Progress, Step
from casstore.store import Store
from casstore.ui.pages import STATIC, Redact, environment, redacted, redactor
from casstore.ui.texts import shown
from casstore.ui.views import session as sessions
from casstore.ui.views.lanes import lanes
from casstore.ui.views.things import image_bytes
from casstore.ui.views.timeline import TimelineRow, timeline
from casstore.ui.views.viewed import Viewed, ViewedPlace

_PAGE: Final = 64
_MAX_IMAGE_BYTES: Final = 1 << 20
#: Longer texts are cut in the file, after they were redacted.
_TEXT_CHARACTERS: Final = 200_000


class Written(NamedTuple):
    """What was written."""

    revision: int
    size_bytes: int
    nodes: int
    #: Hidden nodes, which were left out.
    hidden: int
    #: Texts in which a pattern was found and replaced.
    redacted: int


def write_file(
    store: Store,
    session: str,
    path: str | os.PathLike[str],
    *,
    at: int | None = None,
    redact: Sequence[re.Pattern[str]] = (),
    progress: Progress | None = None,
) -> Written:
    """Write a session, at its head or at a revision, to a file; replaces an existing file."""
    viewed = Viewed(store)
    place = viewed.place(session, at)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8", errors="replace", newline="\n") as file:
            written = _Export(viewed, place, redact, file.write).write(progress)
            file.flush()
            os.fsync(file.fileno())
        size_bytes = temporary.stat().st_size
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return written._replace(size_bytes=size_bytes)


class _Export:
    def __init__(
        self,
        viewed: Viewed,
        place: ViewedPlace,
        patterns: Sequence[re.Pattern[str]],
        write: Callable[[str], object],
    ) -> None:
        self._viewed = viewed
        self._place = place
        self._write = write
        self._replaced = 0
        self._redact: Redact | None = self._counted(redactor(patterns)) if patterns else None
        # Values are redacted, and counted, before they are cut; then the templates redact again.
        self._templates = environment(redactor(patterns) if patterns else None)

    def _counted(self, redact: Redact) -> Redact:
        def counting(text: str) -> str:
            found = redact(text)
            self._replaced += found != text
            return found

        return counting

    def _clean(self, value: Any) -> Any:
        return value if self._redact is None else redacted(value, self._redact)

    def write(self, progress: Progress | None) -> Written:
        """Write the whole file; the result does not have its size yet."""
        viewed, place = self._viewed, self._place
        about = self._clean(sessions.summary(viewed, place))
        picture = self._clean(lanes(viewed, place))
        data = {"about": about, "picture": picture, "place": "", "write": False, "is_file": True,
                "at": None, "leaf": None, "now_ms": viewed.now_ms(),
                "style": Markup(_style())}  # fmt: skip
        head, tail = self._parts("export.html", **data, state=self._state())
        self._write(head)
        rows = self._templates.get_template("export_rows.html")
        nodes = hidden = 0
        for start in range(0, len(place.path), _PAGE):
            page = timeline(
                viewed, place, start=start, page=_PAGE, whole=self._clean,
                forks=sessions.fork_points(viewed, place),
            )  # fmt: skip
            seen = [row for row in page.rows if not row.is_hidden]
            hidden += len(page.rows) - len(seen)
            nodes += len(seen)
            shown_rows = [self._cut(self._clean(row)) for row in seen]
            events = self._clean(list(page.events))
            self._write(rows.render(**data, rows=shown_rows, events=events, images=self._image))
            if progress is not None:
                progress(Step("write", nodes + hidden, len(place.path), "nodes"))
        self._write(tail)
        return Written(place.revision, 0, nodes, hidden, self._replaced)

    def _parts(self, template: str, **data: Any) -> tuple[str, str]:
        """The HTML before the rows, and the HTML after them."""
        whole = self._templates.get_template(template).render(**data)
        # Escaped text has no "<", so the first match is the template's own mark.
        head, _, tail = whole.partition("<!--rows-->")
        return head, tail

    def _cut(self, row: TimelineRow) -> TimelineRow:
        blocks = [
            block._replace(text=block.text[:_TEXT_CHARACTERS] + "… (cut)")
            if len(block.text) > _TEXT_CHARACTERS
            else block
            for block in row.blocks
        ]
        return row._replace(blocks=tuple(blocks))

    def _state(self) -> Any:
        return self._clean(sessions.whole_state(self._viewed, self._place))

    def _image(self, digest: str, block: Block) -> Markup:
        if self._redact is not None:
            return Markup('<div class="note">Image left out: it cannot be redacted</div>')
        try:
            media, data = image_bytes(
                self._viewed, bytes.fromhex(digest), block.path, self._place.session
            )
        except CasstoreError as exc:
            return Markup('<div class="note">Image left out: {}</div>').format(
                escape(shown(str(exc)))
            )
        if len(data) > _MAX_IMAGE_BYTES:
            return Markup('<div class="note">Image left out: {:,} bytes</div>').format(len(data))
        address = f"data:{media};base64,{base64.b64encode(data).decode()}"
        return Markup('<img class="picture" alt="Image in this message" src="{}">').format(address)


def _style() -> str:
    return (STATIC / "style.css").read_text(encoding="utf-8")
