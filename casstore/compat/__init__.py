"""Migration from other stores: their APIs on top of casstore, and importers of their databases.

Each original has its own modules, which are loaded on demand.
"""
