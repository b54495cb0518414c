r"""JSON piece by piece, so that a document may hold stored values of any size.

A document is made of dicts, lists and scalars, and of ``Stored`` values, which are read while
they are written. Texts are escaped so that no terminal takes a part of them for a command, or
shows them in another order: DEL, C1 controls and bidirectional overrides leave as ``\u`` escapes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from casstore.cli.spelling import plain, plain_key, safe_json
from casstore.format.value_json import BYTES_KEY
from casstore.objects import stored
from casstore.objects.stored import Event, Stored

_INDENT: Final = "  "
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))


def json_pieces(value: Any, *, ascii_only: bool = False, indented: bool = True) -> Iterator[str]:
    """The JSON of a document in pieces, on lines of their own or all on one line."""
    return _Writer(ascii_only=ascii_only, indented=indented).pieces(value, 0)


def json_line(value: Any, *, ascii_only: bool = False) -> str:
    """The JSON of a document on one line."""
    return "".join(json_pieces(value, ascii_only=ascii_only, indented=False))


class _Writer:
    def __init__(self, *, ascii_only: bool, indented: bool) -> None:
        self._ascii_only = ascii_only
        self._indented = indented

    def pieces(self, value: Any, level: int) -> Iterator[str]:
        """The JSON of one value of a document."""
        if isinstance(value, Stored):
            yield from self._stored(value.events(), level)
        elif isinstance(value, Mapping):
            yield "{"
            for at, (key, item) in enumerate(value.items()):
                yield self._before(at, level)
                yield self._quote(key if isinstance(key, str) else json.dumps(key)) + ": "
                yield from self.pieces(item, level + 1)
            yield self._end(len(value), level) + "}"
        elif isinstance(value, list | tuple):
            if _SCALARS.issuperset(map(type, value)):
                # A path, for example; a diff prints thousands of them.
                yield self._list([self._scalar(item) for item in value], level)
                return
            yield "["
            for at, item in enumerate(value):
                yield self._before(at, level)
                yield from self.pieces(item, level + 1)
            yield self._end(len(value), level) + "]"
        else:
            yield self._scalar(value)

    def _list(self, items: list[str], level: int) -> str:
        entries = [self._before(at, level) + item for at, item in enumerate(items)]
        return f"[{''.join(entries)}{self._end(len(items), level)}]"

    def _scalar(self, value: Any) -> str:
        return self._quote(value) if isinstance(value, str) else json.dumps(value)

    def _stored(self, events: Iterator[Event], level: int) -> Iterator[str]:
        """The JSON of a stored value."""
        # The brackets that are open, innermost last, and how many entries each has so far.
        closing: list[str] = []
        counts: list[int] = [0]
        for kind, value in events:
            here = level + len(closing)
            if kind == stored.END:
                yield self._end(counts.pop(), here - 1) + closing.pop()
                continue
            if kind == stored.KEY or (closing and closing[-1] == "]"):
                yield self._before(counts[-1], here - 1)
                counts[-1] += 1
            if kind == stored.KEY:
                yield self._quote(plain_key(value)) + ": "
            elif kind == stored.SCALAR:
                yield from self.pieces(plain(value), here)
            elif kind == stored.TEXT:
                yield '"'
                for part in _parts(events):
                    yield self._quote(part)[1:-1]
                yield '"'
            elif kind == stored.BYTES:
                yield "{" + self._before(0, here) + f'"{BYTES_KEY}": "'
                yield from _base64(_parts(events))
                yield '"' + self._end(1, here) + "}"
            else:
                yield "{" if kind == stored.MAP else "["
                closing.append("}" if kind == stored.MAP else "]")
                counts.append(0)

    def _quote(self, text: str) -> str:
        return safe_json(json.dumps(text, ensure_ascii=self._ascii_only))

    def _before(self, at: int, level: int) -> str:
        """What stands before an entry of a container."""
        if self._indented:
            return ("," if at else "") + "\n" + _INDENT * (level + 1)
        return ", " if at else ""

    def _end(self, count: int, level: int) -> str:
        """What stands before the bracket that closes a container."""
        return "\n" + _INDENT * level if self._indented and count else ""


def _base64(parts: Iterator[bytes]) -> Iterator[str]:
    left = b""
    for part in parts:
        left += part
        whole = len(left) - len(left) % 3
        yield base64.b64encode(left[:whole]).decode()
        left = left[whole:]
    yield base64.b64encode(left).decode()


def _parts(events: Iterator[Event]) -> Iterator[Any]:
    """The parts of a long text or of bytes that was begun."""
    while (event := next(events)).kind != stored.END:
        yield event.value
