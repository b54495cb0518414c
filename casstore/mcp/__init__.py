"""The MCP server: an agent reads the sessions of a store, and with ``--write`` adds to them.

``reading`` and ``writing`` are the tools, as functions that return bounded plain data; ``values``
bounds a stored value; ``server`` offers the tools over stdio (``casstore mcp``).
"""
