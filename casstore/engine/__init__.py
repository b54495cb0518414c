"""Where objects and rows live.

``protocol`` says what an engine is; ``memory`` is the reference, plain dicts that
state the meaning; ``lmdb`` keeps them on disk. Nothing above this layer knows
which one it talks to, and ``casstore.testing.EngineContract`` holds all to the
same promises.
"""
