"""The text of a value, and the words of a query.

The text of a value is all strings in it, one on each line. Keys of maps are left out, and so are
the values of ``role`` and ``type``, which would make every message match "user".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.session.arguments import check_text

#: How many characters of a text are indexed. A search does not find the words after them.
MAX_CHARACTERS: Final = 1_000_000
_MAX_QUERY: Final = 4096
_MAX_TERMS: Final = 64
_LABELS: Final = frozenset(("role", "type"))
_TERM: Final = re.compile(r'"([^"]*)"?|([^\s"]+)')
_SPACE: Final = re.compile(r"\s+")

#: A database encloses each match in a snippet with them. ``text_of`` removes them from texts.
BEGIN: Final = "\x02"
END: Final = "\x03"
_CONTROLS: Final = str.maketrans({BEGIN: " ", END: " ", "\0": " "})


def text_of(value: Any) -> str:
    """The strings in a value, in order, without those that only label it."""
    if type(value) is str:
        return _cleaned(value)
    found: list[str] = []
    left = MAX_CHARACTERS
    # The next value is at the end.
    stack = [value]
    while stack and left > 0:
        one = stack.pop()
        kind = type(one)
        if kind is str:
            found.append(one)
            left -= len(one) + 1
        elif kind is dict:
            stack += [one[key] for key in reversed(one) if key not in _LABELS]
        elif kind is list or kind is tuple:
            stack += reversed(one)
    return _cleaned("\n".join(found))


def _cleaned(text: str) -> str:
    return text[:MAX_CHARACTERS].translate(_CONTROLS)


class Term(NamedTuple):
    """Words that must follow each other; ``prefix``: the last one may be the start of a word."""

    words: str
    prefix: bool


def parse(query: str) -> list[Term]:
    """The terms of a query; InvalidInputError if it has none."""
    check_text(query, "words")
    if len(query) > _MAX_QUERY:
        raise InvalidInputError(
            f"words must have at most {_MAX_QUERY} characters, got {len(query)}"
        )
    terms: list[Term] = []
    for phrase, word in _TERM.findall(query.translate(_CONTROLS)):
        prefix = word.endswith("*") and len(word) > 1
        words = phrase or word.rstrip("*")
        if any(map(str.isalnum, words)):
            terms.append(Term(words, prefix))
    if not terms or len(terms) > _MAX_TERMS:
        raise InvalidInputError(
            f"words must have 1 to {_MAX_TERMS} words or phrases that contain a letter or digit, "
            f"got {query!r:.60}"
        )
    return terms


class Snippet(NamedTuple):
    """A part of a text on one line, and where the words are in it."""

    text: str
    matches: tuple[tuple[int, int], ...]


def unmarked(marked: str) -> Snippet:
    """A snippet from a text in which BEGIN and END enclose the matches."""
    parts: list[str] = []
    matches: list[tuple[int, int]] = []
    length = 0
    for at, part in enumerate(re.split(f"[{BEGIN}{END}]", _SPACE.sub(" ", marked).strip())):
        # Matches do not nest, so every second part is one.
        if at % 2:
            matches.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return Snippet("".join(parts), tuple(matches))


def marked(snippet: Snippet, begin: str, end: str) -> str:
    """A snippet with other texts around its matches.

    >>> marked(Snippet("which way?", ((0, 5),)), "[", "]")
    '[which] way?'
    """
    parts: list[str] = []
    done = 0
    for start, stop in snippet.matches:
        parts += (snippet.text[done:start], begin, snippet.text[start:stop], end)
        done = stop
    return "".join((*parts, snippet.text[done:]))


def require_kinds(kinds: Sequence[str] | None, known: Sequence[str]) -> None:
    """InvalidInputError if one of ``kinds`` is not in ``known``."""
    for kind in kinds or ():
        if kind not in known:
            raise InvalidInputError(f"kinds may name {', '.join(known)}; got {kind!r:.60}")
