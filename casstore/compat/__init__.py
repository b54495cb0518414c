"""Moving over from other stores: their calls on casstore, and their databases into it.

Each original has modules of its own here, loaded only when they are asked for.
"""
