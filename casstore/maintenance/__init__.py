"""Care for a store: giving back what nobody reaches, finding damage, saving what is left.

The examples use ``store``, an open store in ``place / "store"``. In it is the session ``s``,
``session``, of two revisions. ``other`` is an empty store.
"""
