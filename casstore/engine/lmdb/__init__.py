"""The embedded engine: an index, slabs of compressed objects, and rows, in one LMDB file.

Read from the bottom up: ``slab`` (several objects as one value), ``compression`` and
``rows`` (what lies in the file); ``directory`` (the files and their locks), ``creation``,
``guard`` (is this file safe to map?), ``gate`` (who is inside?) and ``environment`` (LMDB
itself and its errors); ``log`` (the redo log), ``memtable`` (its commits in memory),
``applying`` (its commits on their way into the tables), ``recent`` (all three together) and
``worker`` (the thread behind the writers); ``reader``, ``transaction``, ``batches`` and
``group`` (one read, one write, many writes that share a flush); ``reserve`` (disk space for
deleting); ``watching`` (who waits for a commit?); ``collection``,
``marking`` and ``notes`` (what nobody reaches); ``packing``, ``tidying`` and
``compaction`` (the same content in less room), ``measuring`` and ``page_arithmetic``
(how much room); ``engine`` (the protocol) and ``sharing`` (one engine for all who open
a store in this process). For damage: ``pages`` (the file without LMDB), ``examination``
(what is wrong?), ``reindexing`` (the index made anew) and ``excavation`` (what still
proves itself in a damaged file). Beside all that, ``disk_cache`` keeps objects that
were read from a server in stores of this engine.
"""
