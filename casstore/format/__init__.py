"""Bytes only: how a value, a blob and a tree are encoded, and how each gets its digest.

Nothing here does I/O, reads a clock or knows an engine. On the way to bytes, ``canonical``
(one encoding for each value) → ``splitting`` (a large value becomes shared pieces) →
``digest`` (each piece gets its name); ``tree`` has the shape of the pieces and ``chunking``
cuts long bytes. ``docs/format.md`` is the normative description.
"""
