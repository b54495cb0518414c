"""The numbers that shape stored bytes, and those that bound what an input may cost (P7).

The first group is part of the format: changing one of them changes the digests of
values, so a change needs a new format version. ``docs/internals/decisions/tree-shape.md``
has the measurements behind them. *Outlined* means stored in an object of its own, with
a link in its place.
"""

from __future__ import annotations

# --- shape: part of the format ------------------------------------------------

# A string or bytes this long leaves its container and becomes a blob of its own. Below it, a link
# (36 bytes, incompressible) costs more than sharing gains.
OUTLINE_MIN_BYTES = 512

# A list or map whose encoding is this long becomes an object of its own. The same
# number as for strings: with it, every item and every value in a piece is short.
CONTAINER_OUTLINE_MIN_BYTES = 512

# Inside a list that is a tree, a list or map is outlined from this size on: the last leaf is
# stored again at every append, and a link costs less there than the item.
LIST_ITEM_OUTLINE_MIN_BYTES = 96

# A list or map up to this size stays in one piece; above it, it becomes a tree.
SINGLE_PIECE_MAX_BYTES = 2048

# A node's payload up to this size stays in the node whole, long texts included.
NODE_PAYLOAD_MAX_BYTES = 2048

# On average, one of this many entries ends a piece.
FANOUT = 16

# A piece ends after this many entries even if no hash ends it before. It has at least
# two, unless it is the last: so every level of a tree is smaller than the one below.
PIECE_MAX_ENTRIES = 128
PIECE_MIN_ENTRIES = 2

# How many levels lists and maps may nest.
MAX_DEPTH = 64

# The longest map key, in bytes of UTF-8.
MAX_KEY_BYTES = 65_536

# --- physical: may change without changing any digest --------------------------

# Blobs this long are cut into chunks.
CHUNKED_BLOB_MIN_BYTES = 65_536

# --- bounds on memory -----------------------------------------------------------

# The most bytes that get_blob and get_value load into memory, unless the caller allows more.
DEFAULT_MAX_BYTES = 1 << 30

# How much memory the repeated parts of a value may take beyond its distinct parts, by the estimate
# of ``format.expansion``: when it is put, when it is imported, and when it is read whole unless the
# caller allows more than DEFAULT_MAX_BYTES.
MAX_REPEATED_BYTES = 1 << 28

# The most entries of one list or map (msgpack's own limit).
MAX_ENTRIES = (1 << 32) - 1
