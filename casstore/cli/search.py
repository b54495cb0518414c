"""``search``: texts of sessions and record systems by the words in them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, nested
from casstore.cli.naming import complete_name
from casstore.cli.output import Part, Printer, bold, dim, name
from casstore.cli.quantities import Whole, count, moment, parse_duration
from casstore.session.found import Hit


def place_of(hit: Hit) -> str:
    """The name under which ``casstore show`` shows a hit."""
    if hit.entry is not None:
        return hit.entry
    return f"{hit.session}#{hit.node}" if hit.node is not None else str(hit.session)


_HIT_FIELDS: Final[Fields] = {
    "kind": "`node`, `component`, or the name of a record system, such as `langgraph`",
    "session": "the oldest session that has the text, null for a record system",
    "revision": "the head of that session, null for a record system",
    "node": "the id of the node, null for anything else",
    "component": "the name of the component, null for anything else",
    "entry": "the entry of a record system as commands name it, null for anything else",
    "position": "where in the entry the text is, null for anything else",
    "place": Field("what `casstore show` takes to show it", of=place_of),
    "snippet": "the part of the text around the words, on one line",
    "matches": "where the words are in the snippet: pairs of first character and end (exclusive)",
    "score": "higher is better; scores of different searches cannot be compared",
    "committed_at": "when the text was committed, null if that is not known",
    "sessions": "sessions that have the text, oldest first, at most 16",
    "session_count": "how many sessions have it, counted up to 1,024",
}


class Since(click.ParamType[int]):
    """A moment, or how long ago it was: ``2026-11-18``, ``2026-11-18T14:00:00Z``, ``7d``."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The moment in milliseconds since 1970."""
        if isinstance(value, int):
            return value
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        with suppress(ValueError):
            return max(0, now_ms - parse_duration(value))
        try:
            found = datetime.fromisoformat(value)
            whole = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
            return max(0, int(whole.timestamp() * 1000))
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time; say 7d, 2026-11-18 or 2026-11-18T14:00:00Z", param, ctx
            )


def _marked(hit: Hit) -> list[Part]:
    """The snippet with its words in bold."""
    parts: list[Part] = []
    done = 0
    for start, stop in hit.matches:
        parts += (hit.snippet[done:start], bold(hit.snippet[start:stop]))
        done = stop
    return [*parts, hit.snippet[done:]]


def _where(hit: Hit) -> str:
    words = [] if hit.component is None else [f"component {hit.component}"]
    words += [] if hit.position is None else [f"at {hit.position}"]
    words += [] if hit.committed_at_ms is None else [moment(hit.committed_at_ms)[:16]]
    if hit.session_count > 1:
        words.append(f"and {count(hit.session_count - 1, 'other session')}")
    return ", ".join(words).replace("T", " ")


@command(
    {
        "hits": nested("the texts with all words, best first", _HIT_FIELDS),
        "index": nested(
            "the index after --rebuild, null otherwise",
            {
                "texts_added": Field("texts that were indexed", "indexed", "text"),
                "texts": Field("texts in the index", "in the index", "text"),
                "sessions": Field("sessions in the index", "sessions", "session"),
                "size_bytes": Field("the space that the index takes", "size"),
            },
            "index",
        ),
    },
    "casstore search postgres timeout",
    "casstore search '\"connection refused\"' --session agent --since 7d",
    "casstore search migrat* --kind langgraph --json",
    "casstore search --rebuild",
)
@click.argument("words", nargs=-1)
@click.option(
    "--session", "sessions", multiple=True, metavar="SESSION", shell_complete=complete_name,
    help="Only texts of this session. May be repeated.",
)  # fmt: skip
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND",
    help="Only node, component, or a record system. May be repeated.",
)  # fmt: skip
@click.option("--since", type=Since(), help="Only what was committed since: 7d, 2026-11-18.")
@click.option(
    "--limit", type=Whole(1, 10_000), default=20, show_default=True,
    help="List at most this many hits.",
)  # fmt: skip
@click.option(
    "--no-update", is_flag=True,
    help="Use the index as it is, without writing; the newest texts may be missing.",
)  # fmt: skip
@click.option("--rebuild", is_flag=True, help="Delete the index and build it from the store.")
def search(
    app: App,
    words: Sequence[str],
    sessions: Sequence[str],
    kinds: Sequence[str],
    since: int | None,
    limit: int,
    no_update: bool,
    rebuild: bool,
) -> None:
    """Find the texts in which all WORDS occur, best first.

    Searches the messages and components of sessions, and the entries of record systems. Words
    in double quotes must follow each other; wor* finds words that begin so. What is hidden or
    deleted is not found. The index is a file in the store's directory, or tables in its schema;
    each search brings it up to date.
    """
    if rebuild == bool(words):
        raise click.UsageError("either give words to search for, or --rebuild")
    if rebuild:
        _rebuild(app)
        return
    with app.open(write=not no_update) as store, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hits = store.search(
            " ".join(words),
            kinds=kinds or None,
            sessions=sessions or None,
            since=since,
            limit=limit,
            fresh=not no_update,
        )

    for one in said:
        app.remark(str(one.message))

    def render(to: Printer) -> None:
        for hit in hits:
            to.line(name(place_of(hit)), "  ", dim(_where(hit)))
            to.line("    ", *_marked(hit))
        if not hits:
            app.remark("nothing found")

    app.exit_code = 0 if hits else 1
    app.answer({"hits": hits, "index": None}, render)


def _rebuild(app: App) -> None:
    from casstore.search import rebuild

    with app.open(write=True) as store, app.meter() as progress:
        report = rebuild(store, progress=progress)
    app.answer({"hits": [], "index": report})
