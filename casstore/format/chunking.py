"""Cuts a long blob into chunks, and builds its rope: the object that lists the chunks.

Cutting is content-defined (FastCDC 2020), so an insertion changes only the chunks around it. Its
parameters (``PROFILE``) are frozen and have golden vectors: cut with others, a blob would have the
same content and digest, but share fewer chunks with earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

from casstore.errors import StorageError
from casstore.format import tree
from casstore.format.digest import Kind

PROFILE: Final = "fastcdc-2020-16k-1"
_AVERAGE_BYTES: Final = 16_384
_MIN_BYTES: Final = 4_096
_MAX_BYTES: Final = 65_536

# emit(kind, data, children) -> digest, as in ``splitting``
Emit = Callable[[int, bytes, list[bytes]], bytes]


def _cutter() -> Any:
    # Imported at the first long blob: it costs as much as all of casstore.
    try:
        from pyfastcdc import FastCDC
    except OSError as exc:
        # The import is late: the process may have no file descriptor left for it.
        raise StorageError(f"pyfastcdc cannot be loaded: {exc.strerror}") from exc

    return FastCDC(
        _AVERAGE_BYTES,
        min_size=_MIN_BYTES,
        max_size=_MAX_BYTES,
        normalized_chunking=1,
        seed=0,
    )


def cut(content: bytes) -> Iterator[bytes]:
    """The chunks of ``content``, in order."""
    for chunk in _cutter().cut_buf(content):
        yield bytes(chunk.data)


def cut_stream(source: BinaryIO) -> Iterator[bytes]:
    """The chunks of everything that ``source`` returns, reading only a little ahead."""
    for chunk in _cutter().cut_stream(source):
        yield bytes(chunk.data)


class RopeBuilder:
    """Stores the chunks of one blob and builds its rope, with little memory."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._builder = tree.Builder(Kind.CHUNKS, self._store_branch)

    def add(self, chunk: bytes) -> None:
        """Store the next chunk."""
        digest = self._emit(Kind.BLOB, chunk, [])
        self._builder.add(tree.Child(digest, len(chunk), len(chunk), ""))

    def finish(self) -> tuple[bytes, list[bytes]]:
        """The sealed rope, to be stored under the digest of the content, and what it links to."""
        level, children = self._builder.finish()
        body = tree.encode_branch(Kind.CHUNKS, level, children)
        return tree.seal_rope(body), [child.digest for child in children]

    def _store_branch(self, level: int, children: list[tree.Child]) -> tree.Child:
        data = tree.encode_branch(Kind.CHUNKS, level, children)
        digest = self._emit(Kind.CHUNKS, data, [child.digest for child in children])
        size = sum([child.size for child in children])
        return tree.Child(digest, size, size, "")
