"""``compact``: the file written anew without gaps, which gives its space back to the disk."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command
from casstore.cli.output import Printer
from casstore.cli.quantities import DURATION, count, size
from casstore.cli.shapes import Shape
from casstore.maintenance import compact as compaction

_SECTION: Final = "Giving space back"


@command(
    _SECTION,
    Shape(
        "compact",
        {
            "file_bytes_before": "how long the file was",
            "file_bytes_after": "how long it is",
            "content_bytes": "keys and values in it, as stored",
            "slabs_before": "slabs there were",
            "slabs_after": "slabs there are",
            "objects": "objects in it, each verified",
            "objects_dropped": "collected objects whose bytes were still there",
            "dictionaries_dropped": "compression dictionaries that nothing needed",
        },
    ),
    "casstore compact --wait 30s",
)
@click.option(
    "--wait", "wait_ms", type=DURATION, default="0", show_default=True,
    help="Wait so long for others to close the store.",
)  # fmt: skip
def compact(app: App, wait_ms: int) -> None:
    """Write the file anew without gaps, verify it, and put it in place.

    Nobody may have the store open meanwhile; who opens it waits. Needs room for the new file
    beside the old one. Stopped anywhere, the store is what it was.
    """
    with app.meter() as meter:
        report = compaction.compact(app.path, wait_s=wait_ms / 1000, progress=meter)

    def render(to: Printer) -> None:
        to.facts(
            [
                ("file", f"{size(report.file_bytes_before)} → {size(report.file_bytes_after)}"),
                ("content", f"{size(report.content_bytes)}, {count(report.objects, 'object')}"),
                ("slabs", f"{report.slabs_before:,} → {report.slabs_after:,}"),
                ("dropped", f"{count(report.objects_dropped, 'collected object')}"),
            ]
        )

    app.answer(report._asdict(), render)
