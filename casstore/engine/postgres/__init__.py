"""Objects and rows in a PostgreSQL database: many machines, one store.

    Write ──> request ──(one statement)──> the function write of tables

``address`` reads where the store is, ``schema`` makes and upgrades it, ``connections`` holds the
pool and turns the server's errors into ours, ``request`` spells a write as arrays, and a function
in ``tables`` carries it out in one round trip. ``collection`` argues why a sweep beside writers
loses nothing. psycopg is imported here and nowhere else.
"""
