"""The session runtime: graphs, checkpoints, heads, history, leases, queues, attachments.

A commit goes from plain data (``data``) through the graph it changes (``graph``), the
manifest it makes (``checkpoint``) and the rows that must still be as they were read
(``commit``) into one engine write. ``session`` is the face of it all.
"""
