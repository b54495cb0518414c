"""The embedded engine: an index, slabs of compressed objects, and rows, in one LMDB file.

Read from the bottom up: ``slab`` (several objects as one value), ``compression`` and
``rows`` (what lies in the file); ``directory`` (the files, their locks, the marker of
unsynced writes), ``kept`` (what a power loss leads back to), ``creation``, ``guard``
(is this file safe to map?), ``gate`` (who is inside?) and ``environment`` (LMDB itself
and its errors); ``reader``, ``transaction`` and ``group`` (one read, one write, many
writes that share a flush); ``watching`` (who waits for a commit?); ``collection``,
``marking`` and ``notes`` (what nobody reaches); ``packing``, ``tidying`` and
``compaction`` (the same content in less room), ``measuring`` and ``page_arithmetic``
(how much room); ``engine`` (the protocol) and ``sharing`` (one engine for all who open
a store in this process). For damage: ``pages`` (the file without LMDB), ``examination``
(what is wrong?), ``reindexing`` (the index made anew) and ``excavation`` (what still
proves itself in a damaged file). Beside all that, ``disk_cache`` keeps objects that
were read from a server in stores of this engine.
"""
