"""The embedded engine: an index, slabs of compressed objects, and rows, in one LMDB file.

Read from the bottom up: ``slab`` (several objects as one value), ``compression`` and ``rows`` (the
content of the file); ``directory`` (the files and their locks), ``creation``, ``guard`` (checks a
file before it is mapped), ``gate`` (counts the threads inside LMDB) and ``environment`` (LMDB
itself and its errors); ``log`` (the redo log), ``memtable`` (its commits in memory), ``applying``
(from the log into the tables), ``recent`` (all three together) and ``worker`` (the background
thread); ``reader``, ``transaction``, ``batches`` and ``group`` (one read, one write, many writes
that share a flush); ``reserve`` (disk space for deleting); ``watching`` (waiting for a commit);
``collection``, ``marking`` and ``notes`` (unreachable objects); ``packing``, ``tidying`` and
``compaction`` (the same content in less space), ``measuring`` and ``page_arithmetic`` (how much
space); ``engine`` (the protocol) and ``sharing`` (one engine for all handles on a store in this
process). For damage: ``pages`` (the file without LMDB), ``examination`` (finds faults),
``reindexing`` (rebuilds the index) and ``page_scan`` (salvages valid content from a damaged
file).
"""
