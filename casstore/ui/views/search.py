"""The search page: snippets of the texts that have the words, each with a link to its text."""

from __future__ import annotations

from typing import Final, NamedTuple

from casstore.errors import InvalidInputError, ReadOnlyError, StorageError
from casstore.maintenance import systems
from casstore.session.found import Hit
from casstore.ui.views.viewed import Viewed

_LIMIT: Final = 50


class SnippetPart(NamedTuple):
    """A part of a snippet: a match, or what is between two."""

    text: str
    is_match: bool


class FoundText(NamedTuple):
    """A hit as the page shows it."""

    hit: Hit
    parts: tuple[SnippetPart, ...]
    #: The name of its record system and the id of its entry, for the link; "" in a session.
    system: str
    entry: str


class SearchPage(NamedTuple):
    """The hits of a search, or the error."""

    words: str
    found: tuple[FoundText, ...]
    problem: str
    #: True: the viewer is read-only, so the index was not brought up to date.
    may_be_old: bool


def search(viewed: Viewed, words: str) -> SearchPage:
    """Search all sessions and record systems."""
    store = viewed.store
    may_be_old = bool(getattr(store.engine, "readonly", False))
    if not words.strip():
        return SearchPage(words, (), "", may_be_old)
    try:
        hits = store.search(words, limit=_LIMIT)
    except (InvalidInputError, ReadOnlyError, StorageError) as exc:
        return SearchPage(words, (), str(exc), may_be_old)
    names: dict[str, str] = {}
    if any(hit.entry is not None for hit in hits):
        held = systems.held_by(store).systems
        names = {systems.prefix_of(one): one.name for one in held}
    found = [
        FoundText(hit, _parts(hit), names.get(hit.kind, ""), _entry(hit.entry)) for hit in hits
    ]
    return SearchPage(words, tuple(found), "", may_be_old)


def _entry(name: str | None) -> str:
    return "" if name is None else name.partition(":")[2]


def _parts(hit: Hit) -> tuple[SnippetPart, ...]:
    parts: list[SnippetPart] = []
    done = 0
    for start, stop in hit.matches:
        parts += (
            SnippetPart(hit.snippet[done:start], False),
            SnippetPart(hit.snippet[start:stop], True),
        )
        done = stop
    parts.append(SnippetPart(hit.snippet[done:], False))
    return tuple([part for part in parts if part.text])
