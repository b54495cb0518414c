"""Objects and rows in a PostgreSQL database: many machines, one store.

    Write ──> request ──(one statement)──> the function write of tables

``address`` parses the URL, ``schema`` creates and upgrades the tables, ``connections`` holds the
pool and translates the server's errors, ``request`` encodes a write as arrays, and a function in
``tables`` runs it in one round trip. ``cache`` and ``disk_cache`` keep objects in memory and in
local files. ``collection`` explains why a sweep concurrent with writers loses nothing. Only this
package imports psycopg.
"""
