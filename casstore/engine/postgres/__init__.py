"""The engine on PostgreSQL: one store for many machines, in a schema of a database.

    Write ──> request ──(one statement)──> the function write of tables

``address`` parses the URL, ``schema`` creates and upgrades the tables, ``connections`` holds the
pool and translates the server's errors, ``request`` encodes a write as arrays, and a function in
``tables`` runs it in one round trip. ``cache`` and ``disk_cache`` keep objects in memory and in
local files. ``watching`` wakes the watches, ``examination`` finds faults, ``vectors`` searches
vectors. ``collection`` explains why a sweep concurrent with writers loses nothing. Only this
package imports psycopg.
"""
