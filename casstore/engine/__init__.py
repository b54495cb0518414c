"""Engines: the layer that stores objects and rows.

``protocol`` defines the interface. ``memory`` is the reference implementation in plain dicts,
``lmdb`` stores on disk, ``postgres`` on a server. The layers above do not depend on which engine
they use; ``casstore.testing.EngineContract`` tests all engines against the same contract.
"""
