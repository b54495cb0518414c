"""Values and texts on their way to a terminal or into JSON (``format.value_json``).

Text from a store may hold anything, also what a terminal takes for a command. Everything
that is not printed as itself is escaped.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, Final

from casstore.format.canonical import Link
from casstore.format.value_json import parse_json as parse_json
from casstore.format.value_json import plain as plain
from casstore.format.value_json import plain_key as plain_key
from casstore.format.value_json import unplain as unplain
from casstore.objects.stored import BytesBeginning, Stored
from casstore.session.messages import message_in, user_text

# Control, format (bidi overrides among them), surrogates, private use, separators of lines.
_ESCAPED: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
SHORT_DIGEST: Final = 12


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
    """The beginning of a text, on one line."""
    line = safe(" ".join(text[: 4 * width + 8].split()))
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def clip_name(text: str, width: int = 40) -> str:
    """The beginning of an id: nothing in it is left out or made equal, only escaped."""
    line = safe(text[: width + 1])
    return line if len(line) <= width else line[: width - 1] + "…"


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
    """What a node says, on one line: who, and the beginning of it."""
    payload = begun(payload, width)
    message = message_in(payload)
    if message is None:
        return brief(payload, width)
    text = user_text(payload)
    role = clip(message["role"], 16)
    if not text:
        return f"{role}: {brief(message, max(8, width - len(role) - 2))}"
    return f"{role}: {clip(text, max(8, width - len(role) - 2))}"
