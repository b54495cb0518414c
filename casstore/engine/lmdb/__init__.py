"""The embedded engine: an index, slabs of compressed objects, and rows, in one LMDB file.

The modules, from the bottom up:

    slab, dictionaries            several objects as one value; what compresses them
    lookup                        rows by key, and the index: from a digest to an object's id
    directory, creation           the files and their locks; a new store
    environment, translation      LMDB itself: transactions, errors; inheritance: after a fork
    log, memtable, applying       the redo log; its commits in memory; from the log into the tables
    recent, worker                these three together; the background thread
    reader, batches               reads of objects; writes that share one commit
    reserve                       disk space for deleting
    watching, inotify             waiting for a commit
    collection, marking, notes    garbage collection
    packing, tidying, compaction  the same content in less space; background: packing in a thread
    measuring, page_arithmetic    how much space is used
    hot_copy, verification        a copy of a store in use; a check of all content
    engine, sharing               the engine protocol; one engine for each store and process
    page_scan                     the file without LMDB: checks before mapping, salvage
    examination, reindexing       for damage: faults one by one; a new index
"""
