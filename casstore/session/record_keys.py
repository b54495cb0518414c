"""Texts into row keys: in order of the texts, unambiguous, never longer than a key may be.

    key = table ‖ 00 ‖ part ‖ 00 ‖ part ‖ 00 …

Inside a part the byte 00 is spelled 01 01 and 01 is spelled 01 02, so that 00 only ends parts
and the order stays. A part too long for its room is cut, and the hash of the whole follows a
byte that UTF-8 never holds; the row then holds the texts (``rows``).
"""

from __future__ import annotations

from typing import Final

from casstore.engine.protocol import MAX_ROW_KEY_BYTES
from casstore.errors import InvalidInputError
from casstore.format.hashing import DIGEST_BYTES, plain_hash
from casstore.session.arguments import check_count

_END: Final = b"\0"
_CUT: Final = b"\xff"
_MAX_NAME_BYTES: Final = 31
# Shorter than that, nearly every id would be cut.
_MIN_ROOM: Final = 64
# What a text may have at the most, as ids elsewhere: it may be stored in the row, too.
MAX_TEXT_BYTES: Final = 16_384


class KeySpace:
    """The keys of one table, each of the same number of texts."""

    __slots__ = ("_room", "parts", "start")

    def __init__(self, name: str, parts: int) -> None:
        if type(name) is not str or not name.isascii():
            raise InvalidInputError(f"a table has a short ASCII name, not {name!r:.40}")
        spelled = name.encode("ascii")
        if not spelled or len(spelled) > _MAX_NAME_BYTES or _END in spelled:
            raise InvalidInputError(f"a table has a short ASCII name, not {name!r:.40}")
        check_count(parts, "how many texts a key has", least=1)
        self.start = spelled + _END
        self.parts = parts
        self._room = (MAX_ROW_KEY_BYTES - len(self.start)) // parts - len(_END)
        if self._room < _MIN_ROOM:
            raise InvalidInputError(f"keys of {parts} texts do not fit")

    def key(self, texts: tuple[str, ...]) -> bytes:
        """What the keys of rows start with that begin with these texts; of all, that of one."""
        if len(texts) > self.parts:
            raise InvalidInputError(f"a key of {self.parts} texts, not of {len(texts)}")
        return self.start + b"".join([self._part(text) for text in texts])

    def row(self, texts: tuple[str, ...]) -> bytes:
        """The key of one row; refused with fewer texts, under which there is none."""
        if not isinstance(texts, tuple | list) or len(texts) != self.parts:
            raise InvalidInputError(f"a key is a tuple of {self.parts} texts, not {texts!r:.80}")
        return self.key(texts)

    def is_cut(self, texts: tuple[str, ...]) -> bool:
        """Is one of these too long to be read back from the key?"""
        return any(len(_escaped(text)) > self._room for text in texts)

    def texts(self, key: bytes) -> tuple[str, ...]:
        """The texts of a key that holds them all."""
        return split_texts(key[len(self.start) :])

    def group(self, key: bytes, depth: int) -> bytes:
        """The start of ``key`` that its first ``depth`` parts take."""
        at = len(self.start)
        for _ in range(depth):
            end = key.find(_END, at)
            cut = key.find(_CUT, at)
            # A cut part fills its room; its hash may hold any byte.
            at = at + self._room + 1 if 0 <= cut < end or end < 0 else end + 1
        return key[:at]

    def starting(self, texts: tuple[str, ...], text: str) -> bytes:
        """What the keys start with whose next text after ``texts`` starts with ``text``.

        Of a text too long for a key, more than those: the texts themselves must be looked at.
        """
        return self.key(texts) + _escaped(text)[: self._room - len(_CUT) - DIGEST_BYTES]

    def _part(self, text: str) -> bytes:
        spelled = _escaped(text)
        if len(spelled) > self._room:
            kept = self._room - len(_CUT) - DIGEST_BYTES
            spelled = spelled[:kept] + _CUT + plain_hash(spelled)
        return spelled + _END


def split_texts(parts: bytes) -> tuple[str, ...]:
    """The texts of what follows a table's name in a key, if it holds them all."""
    return tuple([_unescaped(part) for part in parts[:-1].split(_END)])


def past(prefix: bytes) -> bytes:
    """The first key behind all that start with ``prefix``, which ends in a byte below 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def _escaped(text: str) -> bytes:
    if type(text) is not str:
        raise InvalidInputError(f"keys are made of str, not {type(text).__name__}")
    try:
        spelled = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{text[:40]!r} holds a lone surrogate") from exc
    if len(spelled) > MAX_TEXT_BYTES:
        raise InvalidInputError(f"a key of at most {MAX_TEXT_BYTES} bytes, not {len(spelled)}")
    if b"\0" in spelled or b"\1" in spelled:
        spelled = spelled.replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")
    return spelled


def _unescaped(part: bytes) -> str:
    if b"\1" in part:
        part = part.replace(b"\1\1", b"\0").replace(b"\1\2", b"\1")
    return part.decode()
