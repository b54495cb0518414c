"""Migration from other stores: their APIs on top of casstore, and importers of their databases.

The modules of each of these systems are loaded when it is used.
"""
