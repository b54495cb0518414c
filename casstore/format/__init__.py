"""Bytes only: what a value, a blob and a tree look like, and how each is named.

Nothing here does I/O, reads a clock or knows an engine. The way down is
``canonical`` (one value, one spelling) → ``splitting`` (a large value becomes
shared pieces) → ``digest`` (each piece gets its name); ``tree`` holds the shape
of the pieces and ``chunking`` cuts long bytes. ``docs/format.md`` is the
normative description.
"""
