"""A set of object ids as a bitmap, for passes over all objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# Ids are dense, so blocks are well filled. Blocks limit the memory that one damaged, huge id costs.
_BLOCK_BYTES: Final = 8192
_BLOCK_IDS: Final = 8 * _BLOCK_BYTES


class IdSet:
    """A set of ids, one bit each, in blocks that are allocated on demand."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}

    def add(self, object_id: int) -> None:
        """Add an id."""
        number, at = divmod(object_id, _BLOCK_IDS)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = bytearray(_BLOCK_BYTES)
        block[at >> 3] |= 1 << (at & 7)

    def discard(self, object_id: int) -> None:
        """Remove an id."""
        number, at = divmod(object_id, _BLOCK_IDS)
        block = self._blocks.get(number)
        if block is not None:
            block[at >> 3] &= ~(1 << (at & 7))

    def __contains__(self, object_id: int) -> bool:
        number, at = divmod(object_id, _BLOCK_IDS)
        block = self._blocks.get(number)
        return block is not None and bool(block[at >> 3] >> (at & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        """The ids in order. Ids may be added meanwhile, but the iteration may miss them."""
        for number in sorted(self._blocks):
            block = self._blocks[number]
            for at in range(_BLOCK_BYTES):
                bits = block[at]
                if bits:
                    first = number * _BLOCK_IDS + 8 * at
                    for bit in range(8):
                        if bits >> bit & 1:
                            yield first + bit

    def __len__(self) -> int:
        return sum([int.from_bytes(block, "little").bit_count() for block in self._blocks.values()])
