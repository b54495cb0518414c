"""``ui`` shows a store in the browser; ``html`` writes a session as one HTML file."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command, needs_extra
from casstore.cli.naming import complete_name
from casstore.cli.output import Printer, dim, name
from casstore.cli.quantities import Whole, count, size
from casstore.errors import InvalidInputError
from casstore.store import shown_place

_PACKAGES: Final = ("starlette", "uvicorn", "jinja2", "markupsafe")
_NEEDED: Final = ("the viewer", "ui", _PACKAGES)


def _report(text: str) -> None:
    """Write a line to stderr. A closed stderr does not make the command fail."""
    with suppress(OSError):
        Printer(sys.stderr).line(text)


@command(
    {
        "address": "the URL to open in a browser; the token in it is for this run alone",
        "store": "the store that is shown",
        "write": "true: the pages can change the store",
        "warning": "which other machines can reach the viewer, null if none can",
    },
    "casstore ui",
    "casstore ui my-store --no-browser --port 9000",
    "casstore ui my-store --write",
)
@click.argument("store_", metavar="[STORE]", required=False)
@click.option(
    "--port", type=Whole(0, 65535),
    help="The port to listen on; 0: any free one. Default: 8642, or a free one if it is in use.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option("--write", is_flag=True, help="Let the pages fork, label, tag, rewind and delete.")
def ui(
    app: App, store_: str | None, port: int | None, host: str, no_browser: bool, write: bool
) -> None:
    """Show the store in the browser, until Ctrl-C.

    STORE is a directory or postgresql://…, as for --store. The address has a token that changes
    with every start. Only this machine can reach the viewer, unless --host is given. Without
    --write the store is opened read-only.
    """
    with needs_extra(*_NEEDED):
        from casstore.ui.serving import Serving, is_loopback
    place = app.place_of(store_)
    with app.open(write=write, path=place) as store:
        serve = Serving(store, place, host=host, port=port, write=write)
        warning = None
        if not is_loopback(host):
            warning = (
                f"{host} can be reached from other machines, without encryption; anyone with "
                "the address can read the store" + (" and change it" if write else "")
            )
        document = {
            "address": serve.address,
            "store": shown_place(place),
            "write": write,
            "warning": warning,
        }
        app.answer(document, lambda to: to.line(name(serve.address)))
        sys.stdout.flush()
        # At once, and not as remarks: the command ends only when the viewer does.
        if warning is not None and not app.as_json:
            _report(f"warning: {warning}")
        if not app.quiet and not app.as_json:
            _report("its pages can change the store; Ctrl-C ends it" if write else "Ctrl-C ends it")
        if not no_browser:
            import webbrowser

            webbrowser.open(serve.address)
        serve.run()


@command(
    {
        "session": "the session",
        "revision": "the revision that was written",
        "file": "the file",
        "size_bytes": "its size",
        "nodes": "how many nodes are in it",
        "hidden": "how many hidden nodes were left out",
        "redacted": "how many pieces of text --redact has replaced",
    },
    "casstore html agent -o agent.html",
    "casstore html agent@41 -o agent.html --redact 'sk-[A-Za-z0-9]+'",
)
@click.argument("name_", metavar="SESSION", shell_complete=complete_name)
@click.option("--output", "-o", required=True, metavar="FILE", help="The file to write.")
@click.option(
    "--redact", multiple=True, metavar="PATTERN",
    help="Replace what this regular expression finds, everywhere. May be given again.",
)  # fmt: skip
def html(app: App, name_: str, output: str, redact: tuple[str, ...]) -> None:
    """Write SESSION as one HTML file that loads nothing from elsewhere.

    SESSION is a session, SESSION@REVISION, SESSION@LABEL or a tag on a checkpoint. Hidden nodes
    are left out. With --redact images are left out as well: patterns cannot look into them.
    """
    patterns: list[re.Pattern[str]] = []
    for one in redact:
        try:
            patterns.append(re.compile(one))
        except re.error as exc:
            raise InvalidInputError(f"--redact {one!r} is not a regular expression: {exc}") from exc
    with needs_extra(*_NEEDED):
        from casstore.ui.export import write_file
    with app.open() as store:
        target = naming.resolve_revision(store, name_, "name a session or a revision of one")
        with app.meter() as meter:
            done = write_file(
                store, target.session, output, at=target.at, redact=patterns, progress=meter
            )

    def render(to: Printer) -> None:
        summary = f", {count(done.nodes, 'node')}, {size(done.size_bytes)}"
        if done.redacted:
            summary += f", {count(done.redacted, 'text')} redacted"
        to.line("wrote ", name(output), dim(summary))

    app.answer(done, render, session=target.session, file=output)
