"""Values and texts on their way to a terminal or into JSON (``format.value_json``).

Text from a store may hold anything, also what a terminal takes for a command. Everything
that is not printed as itself is escaped.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final

from casstore.cli import payloads
from casstore.cli.payloads import Block, read_message
from casstore.format.canonical import Link
from casstore.format.value_json import BYTES_KEY
from casstore.format.value_json import parse_json as parse_json
from casstore.format.value_json import plain as plain
from casstore.format.value_json import plain_key as plain_key
from casstore.format.value_json import unplain as unplain
from casstore.objects import stored
from casstore.objects.stored import BytesBeginning, Stored, WalkEvent
from casstore.session.messages import IMAGE_TEXT

# Control, format (bidi overrides among them), surrogates, private use, separators of lines.
_ESCAPED: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
SHORT_DIGEST: Final = 12
# The width of an id in a sentence.
_NAME_WIDTH: Final = 40


def safe(text: str) -> str:
    """The text with everything escaped that a terminal would not print as itself."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        [
            char
            if char == " " or unicodedata.category(char) not in _ESCAPED
            else char.encode("unicode_escape").decode()
            for char in text
        ]
    )


def clip(text: str, width: int) -> str:
    """The beginning of a text on one line of at most ``width`` characters, escaped."""
    line = safe(" ".join(text[: 4 * width + 8].split()))
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def clip_name(text: str) -> str:
    """The beginning of an id, escaped; unlike ``clip``, it keeps every space."""
    line = safe(text[: _NAME_WIDTH + 1])
    return line if len(line) <= _NAME_WIDTH else line[: _NAME_WIDTH - 1] + "…"


def short(digest: bytes) -> str:
    """The first digits of a digest."""
    return digest.hex()[:SHORT_DIGEST]


# --- JSON ---------------------------------------------------------------------------------


def safe_json(text: str) -> str:
    """JSON that stays JSON, with everything escaped that a terminal would not print as itself.

    ``safe`` escapes as Python does, and JSON has other escapes. Only strings can hold such
    characters; JSON's own line ends are left.
    """
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(
        [
            char
            if char == "\n" or unicodedata.category(char) not in _ESCAPED
            else json.dumps(char)[1:-1]
            if char != "\x7f"
            else "\\u007f"
            for char in text
        ]
    )


def brief(value: Any, width: int) -> str:
    """A value on one line of this width at the most; of a long one only the beginning is read."""
    return clip(_cut(begun(value, width), width), width)


def begun(value: Any, width: int) -> Any:
    """As much of a stored value as a line of this width shows; other values as they are."""
    # Runs of spaces are shown as one, so more is read than is shown.
    return value.beginning(8 * width + 256, 4 * width + 8) if isinstance(value, Stored) else value


def _cut(value: Any, room: int) -> str:
    """JSON of a value, or at least ``room`` characters of it."""
    if isinstance(value, str):
        return json.dumps(value[: room + 1], ensure_ascii=False)
    if isinstance(value, bytes):
        length = value.size_bytes if isinstance(value, BytesBeginning) else len(value)
        return f"<{length:,} bytes {value[:8].hex()}{'…' if length > 8 else ''}>"
    if isinstance(value, Link):
        return f"<link {short(value.digest)}>"
    if not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    is_map = isinstance(value, dict)
    parts: list[str] = []
    used = 0
    for entry in value.items() if isinstance(value, dict) else value:
        if used > room:
            break
        if is_map:
            part = f"{json.dumps(entry[0][:room], ensure_ascii=False)}: {_cut(entry[1], room)}"
        else:
            part = _cut(entry, room)
        parts.append(part)
        used += len(part) + 2
    inside = ", ".join(parts)
    return f"{{{inside}}}" if is_map else f"[{inside}]"


def summary(payload: Any, width: int) -> str:
    """The role of a message and the beginning of it, on one line; of other payloads their JSON.

    A tool call is ``→ name arguments``, its result ``← text``.
    """
    payload = begun(payload, width)
    message = read_message(payload)
    words = [_words(block) for block in message.blocks]
    text = " ".join([word for word in words if word])
    if not message.role or not text:
        return brief(payload, width)
    role = clip(message.role, 16)
    return f"{role}: {clip(text, max(8, width - len(role) - 2))}"


def _words(block: Block) -> str:
    if block.kind == payloads.CALL:
        return f"→ {block.name or 'tool'} {block.text}".rstrip()
    if block.kind == payloads.RESULT:
        return f"← {'failed: ' if block.is_error else ''}{block.text}"
    if block.kind == payloads.IMAGE:
        return IMAGE_TEXT
    return "" if block.kind in (payloads.THINKING, payloads.LINK) else block.text


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

    def _stored(self, events: Iterator[WalkEvent], level: int) -> Iterator[str]:
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


def _parts(events: Iterator[WalkEvent]) -> Iterator[Any]:
    """The parts of the text or bytes whose first event was just read, up to its end."""
    while (event := next(events)).kind != stored.END:
        yield event.value
