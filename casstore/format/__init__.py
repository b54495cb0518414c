"""The stored formats: how values, blobs and trees are encoded, and how each gets its digest.

Nothing here does I/O, reads a clock or uses an engine. A value passes through ``canonical`` (one
encoding for each value), ``splitting`` (a large value becomes shared pieces) and ``digest`` (each
piece gets its digest); ``tree`` defines the shape of the pieces, and ``chunking`` cuts long bytes.
``docs/internals/format.md`` is the normative description.
"""
