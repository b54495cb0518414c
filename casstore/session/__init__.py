"""The session runtime: graphs, checkpoints, heads, history, leases, queues, attachments.

A commit goes from its arguments (``data``) through the graph that it changes (``graph``) and the
components that it sets (``checkpoint``) into one engine write, on condition that the rows it read
are unchanged (``commit``). ``session`` has the public class.
"""
