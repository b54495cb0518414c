"""Objects and rows in a PostgreSQL database: many machines, one store.

    write ──> request ──(one statement)──> functions.sql ──> tables

``address`` reads where the store is, ``schema`` makes and upgrades its tables, ``connections`` holds
the pool and turns the server's errors into ours, ``request`` spells a write as arrays, and the
functions in ``statements`` carry it out in one round trip. ``collection`` argues why a sweep beside
writers loses nothing. psycopg is imported here and nowhere else.
"""
