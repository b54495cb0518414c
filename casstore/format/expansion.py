"""How large a value becomes when its shared parts are decoded at each of their occurrences.

A part is a list or map in an object of its own. Each link to it is an *occurrence*: a reader
decodes the part again for each. So thirty objects of two links each describe a value of 2**30
parts. ``expand`` computes what that costs from the distinct parts alone, in time proportional to
them, so that a reader, a writer and an import can refuse such a value before any of it is built
(P7).

A *cost* is an estimate, in bytes, of the memory that CPython takes for decoded lists and maps, plus
a charge for the time that decoding a part takes. A long text is decoded once, however often it
occurs, and costs nothing here: ``max_bytes`` bounds texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import ExpansionError
from casstore.format import canonical, tree
from casstore.format.digest import Kind

_CONTAINERS: Final = frozenset((dict, list))
_NUMBERS: Final = frozenset((int, bool, type(None)))
# Memory in CPython: an empty list and an empty map, with their garbage collector headers; a list
# item with its slot, the same if all are numbers, and a map entry.
_LIST_BYTES: Final = 80
_MAP_BYTES: Final = 200
_ITEM_BYTES: Final = 64
_NUMBER_BYTES: Final = 24
_ENTRY_BYTES: Final = 128
# Decoding a part takes about a microsecond, following each of its links two more. With these
# charges MAX_REPEATED_BYTES are decoded in one to two seconds.
_PART_BYTES: Final = 256
_LINK_BYTES: Final = 512


class Expansion(NamedTuple):
    """The cost of a value: with all occurrences of its parts, and with each part once."""

    everywhere: int
    once: int

    @property
    def repeated(self) -> int:
        """The cost of the second and later occurrences of parts."""
        return self.everywhere - self.once


def memory_bytes(value: Any, size: int) -> int:
    """About how much memory a decoded piece of ``size`` encoded bytes takes."""
    return size + _containers_bytes(value)


def _containers_bytes(value: Any) -> int:
    kind = type(value)
    if kind is dict:
        items = value.values()
        taken = _MAP_BYTES + _ENTRY_BYTES * len(value)
    elif kind is list:
        items = value
        taken = _LIST_BYTES
        if len(value) > 8 and _NUMBERS.issuperset(map(type, items)):
            return taken + _NUMBER_BYTES * len(value)
        taken += _ITEM_BYTES * len(value)
    else:
        return 0
    if not _CONTAINERS.isdisjoint(map(type, items)):
        for item in items:
            kind = type(item)
            if kind is dict or kind is list:
                taken += _containers_bytes(item)
    return taken


def most_cost(size: int) -> int:
    """An upper bound on the cost of one occurrence of a part of ``size`` encoded bytes."""
    # The extremes: a list of empty maps, of one encoded byte each; links in a branch, of 32 each.
    return part_cost(size * (1 + _MAP_BYTES + _ITEM_BYTES), size // 32)


def part_cost(memory: int, links: int) -> int:
    """The cost of one occurrence of a part that takes ``memory`` bytes and has ``links`` links."""
    return memory + _PART_BYTES + _LINK_BYTES * links


def own_cost(kind: int, data: bytes) -> tuple[int, list[bytes]]:
    """The cost of one occurrence of an object, without its parts; and the digests of its parts.

    A part that occurs several times is listed as often. Only lists and maps, and the nodes and
    manifests that hold them, have parts.
    """
    if kind in (Kind.LIST, Kind.MAP):
        parts = tree.decode_branch(kind, data).digests
        return part_cost(len(data), len(parts)), parts
    if kind not in (Kind.VALUE, Kind.NODE, Kind.MANIFEST):
        return 0, []
    value, links = canonical.inspect(data)
    parts = [name for role, name in links if role >= canonical.ROLE_PART]
    return part_cost(memory_bytes(value, len(data)), len(links)), parts


def expand(
    roots: Iterable[bytes],
    below: Mapping[bytes, Sequence[bytes]],
    cost: Callable[[bytes], int],
) -> Expansion:
    """The cost of the parts ``roots``, with all parts below them.

    ``below`` maps a part to the parts that it links to, once for each link; a part without an
    entry links to none. ``cost`` returns the cost of one occurrence of a part alone.
    """
    costs: dict[bytes, int] = {}
    begun: set[bytes] = set()
    once = everywhere = 0
    for root in roots:
        ahead = [root]
        while ahead:
            name = ahead[-1]
            parts = below.get(name, ())
            if name not in begun:
                begun.add(name)
                ahead += [part for part in dict.fromkeys(parts) if part not in begun]
                continue
            ahead.pop()
            if name not in costs:
                own = cost(name)
                once += own
                # No part contains itself: its name is the hash of its content.
                costs[name] = own + sum([costs[part] for part in parts])
        everywhere += costs[root]
    return Expansion(everywhere, once)


def has_repetition(roots: Iterable[bytes], below: Mapping[bytes, Sequence[bytes]]) -> bool:
    """True if any part occurs more than once."""
    seen: set[bytes] = set()
    places = 0
    for parts in (tuple(roots), *below.values()):
        seen.update(parts)
        places += len(parts)
    return places > len(seen)


def refuse_repetition(repeated: int, limit: int, remedy: str) -> ExpansionError:
    """The error for a value whose shared parts, written out, are too large."""
    return ExpansionError(
        f"shared parts of the value repeat: built, they would take about {repeated:,} bytes of "
        f"memory (at most {limit:,}); {remedy}"
    )
