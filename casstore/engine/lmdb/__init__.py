"""The embedded engine: an index, slabs of compressed objects, and rows, in one LMDB file.

Read from the bottom up: ``slab`` (several objects as one value), ``compression`` and
``rows`` (what lies in the file); ``directory`` (the files, their locks, the marker of
unsynced writes), ``creation``, ``guard`` (is this file safe to map?), ``gate`` (who is
inside?) and ``environment`` (LMDB itself and its errors); ``reader``, ``transaction`` and
``group`` (one read, one write, many writes that share a flush); ``watching``
(who waits for a commit?); ``packing``, ``tidying`` and ``compaction`` (the same content in
less room), ``measuring`` (how much room); ``engine`` (the protocol) and ``sharing`` (one
engine for all who open a store in this process).
"""
