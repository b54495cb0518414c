"""Encodes tuples of texts as row keys: unambiguous, in order, within the size limit of keys.

    key = table ‖ 00 ‖ part ‖ 00 ‖ part ‖ 00 …

Inside a part the byte 00 is encoded as 01 01, and 01 as 01 02, so that 00 only ends parts and the
order is preserved. A part longer than its share of the key is truncated, followed by a byte that
does not occur in UTF-8 and the hash of the whole; the row then holds the texts (``records``).
"""

from __future__ import annotations

from typing import Final

from casstore.engine.protocol import MAX_ROW_KEY_BYTES
from casstore.errors import InvalidInputError
from casstore.format.digest import DIGEST_BYTES, plain_hash
from casstore.session.arguments import check_count

_END: Final = b"\0"
#: The byte after a truncated text. A text that was truncated cannot be read back from the key.
CUT: Final = b"\xff"
_STR: Final = frozenset((str,))
_MAX_NAME_BYTES: Final = 31
# The least space for a part, in bytes: with less, nearly every id would be truncated.
_MIN_PART_BYTES: Final = 64
# The longest text, in bytes, as for ids: the row stores a text that the key truncates.
MAX_TEXT_BYTES: Final = 16_384


class KeySpace:
    """The keys of one table, each of the same number of texts."""

    __slots__ = ("_max_part_bytes", "parts", "start")

    def __init__(self, name: str, parts: int) -> None:
        if type(name) is not str or not name.isascii():
            raise InvalidInputError(f"the name of a table must be ASCII text, got {name!r:.40}")
        encoded = name.encode("ascii")
        if not encoded or len(encoded) > _MAX_NAME_BYTES or _END in encoded:
            raise InvalidInputError(
                f"the name of a table must have 1 to {_MAX_NAME_BYTES} bytes and no NUL, "
                f"got {name!r:.40}"
            )
        check_count(parts, "parts", least=1)
        self.start = encoded + _END
        self.parts = parts
        self._max_part_bytes = (MAX_ROW_KEY_BYTES - len(self.start)) // parts - len(_END)
        if self._max_part_bytes < _MIN_PART_BYTES:
            raise InvalidInputError(f"keys of {parts} texts are too long; use fewer parts")

    def key(self, texts: tuple[str, ...]) -> bytes:
        """The key prefix of rows whose first texts are ``texts``; with all texts, one row's key."""
        if len(texts) > self.parts:
            raise InvalidInputError(f"a key must have {self.parts} texts, got {len(texts)}")
        return self.start + b"".join([self._part(text) for text in texts])

    def row(self, texts: tuple[str, ...]) -> bytes:
        """The key of one row; InvalidInputError unless all texts are given."""
        if not isinstance(texts, tuple | list) or len(texts) != self.parts:
            raise InvalidInputError(f"a key must be {self.parts} texts, got {texts!r:.80}")
        if _STR.issuperset(map(type, texts)):
            # Fast path: the key is short as a whole, and no text holds a byte to be encoded.
            joined = "\0".join(texts)
            if (
                len(joined) <= self._max_part_bytes
                and joined.isascii()
                and joined.count("\0") == self.parts - 1
                and "\1" not in joined
            ):
                return self.start + joined.encode() + _END
        return self.key(tuple(texts))

    def texts(self, key: bytes) -> tuple[str, ...]:
        """The texts of a key in which none is truncated."""
        return split_texts(key[len(self.start) :])

    def group(self, key: bytes, depth: int) -> bytes:
        """The prefix of ``key`` that holds its first ``depth`` parts."""
        at = len(self.start)
        for _ in range(depth):
            end = key.find(_END, at)
            cut = key.find(CUT, at)
            # A truncated part has a fixed length; its hash may contain any byte.
            at = at + self._max_part_bytes + 1 if 0 <= cut < end or end < 0 else end + 1
        return key[:at]

    def starting(self, texts: tuple[str, ...], text: str) -> bytes:
        """The key prefix of rows whose next text after ``texts`` starts with ``text``.

        If ``text`` is too long for a key, other rows have the prefix, too: compare their texts.
        """
        return self.key(texts) + _escaped(text)[: self._max_part_bytes - len(CUT) - DIGEST_BYTES]

    def _part(self, text: str) -> bytes:
        encoded = _escaped(text)
        if len(encoded) > self._max_part_bytes:
            kept = self._max_part_bytes - len(CUT) - DIGEST_BYTES
            encoded = encoded[:kept] + CUT + plain_hash(encoded)
        return encoded + _END


def split_texts(parts: bytes) -> tuple[str, ...]:
    """The texts in a key after the table's name, if none is truncated."""
    return tuple([_unescaped(part) for part in parts[:-1].split(_END)])


def past(prefix: bytes) -> bytes:
    """The first key after all keys with ``prefix``, whose last byte must be below 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def _escaped(text: str) -> bytes:
    if type(text) is not str:
        raise InvalidInputError(f"the texts of a key must be str, got {type(text).__name__}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"a text of a key has a lone surrogate: {text[:40]!r}") from exc
    if len(encoded) > MAX_TEXT_BYTES:
        raise InvalidInputError(
            f"each text of a key must have at most {MAX_TEXT_BYTES} bytes, got {len(encoded)}"
        )
    if b"\0" in encoded or b"\1" in encoded:
        encoded = encoded.replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")
    return encoded


def _unescaped(part: bytes) -> str:
    if b"\1" in part:
        part = part.replace(b"\1\1", b"\0").replace(b"\1\2", b"\1")
    return part.decode()
