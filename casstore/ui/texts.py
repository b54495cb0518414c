"""Prepares text of a store for a page: escapes control characters and cuts long text.

The templates escape markup. This module escapes the characters that are no markup and that a
browser would still obey: those that turn the direction of writing, or show nothing.
"""

from __future__ import annotations

import re
from typing import Final

# Controls but tab and newline, directional marks and overrides, invisible characters, private
# use, and lone surrogates, which UTF-8 cannot encode. U+200D joins emoji and stays.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufe00-\ufe0d\ufeff\ufff0-\ufffb\ud800-\udfff\ue000-\uf8ff"
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)
_SHORT_DIGEST: Final = 12


def _encoded(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown(text: str) -> str:
    """The text with every character escaped that a browser would obey or not show.

    >>> shown("one" + chr(0x202E) + "two") == "one" + chr(92) + "u202etwo"
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNSEEN.sub(_encoded, text.replace("\r\n", "\n"))


def one_line(text: str, width: int = 120) -> str:
    """The beginning of a text, on one line of at most ``width`` characters, escaped.

    >>> one_line("a long text", 6)
    'a lon…'
    """
    line = shown(" ".join(text[: 4 * width + 8].split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def cut(text: str, limit: int) -> str:
    """The text, or its first ``limit`` characters and an ellipsis.

    >>> cut("a long text", 6)
    'a long…'
    """
    return text if len(text) <= limit else text[:limit] + "…"


def short(digest: bytes) -> str:
    """The first digits of a digest."""
    return digest.hex()[:_SHORT_DIGEST]
