"""The MCP server: an agent reads the sessions of a store, and with ``--write`` adds to them.

``reading`` and ``writing`` are the tools, as functions that return plain data of limited size;
``values`` cuts a stored value to that size; ``server`` offers the tools over stdio
(``casstore mcp``).
"""
