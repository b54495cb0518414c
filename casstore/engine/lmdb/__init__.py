"""The embedded engine: an index, slabs of compressed objects, and rows, in one LMDB file.

Read from the bottom up: ``slab`` (several objects as one value) and
``compression``; ``directory`` (the files, their locks, the marker of unsynced
writes), ``guard`` (is this file safe to map?), ``environment`` (LMDB itself, the
only module that knows its errors), ``group`` (commits that share a flush),
``engine`` (the protocol).
"""
