"""The tables of a store and the functions that change them, as PostgreSQL is told.

    objects     digest → id, kind, links by id, compressed content; when it was stored, when put
                again, and its epoch: the newest collection that was told it is relied upon
    rows        (table, key) → value, all of them bytes: no collation, no locale
    clients     for each connection of a client the last write it made, so that none happens twice
    watchers    who wants to be told of writes
    state       one row: the epoch, and who collects
    meta        family, version

``{s}`` is the schema, put in as an identifier; nothing else is ever put into a statement.

The function ``write`` is the one way in which anything but a sweep changes a store. Locks are taken
in one order by all: the store (shared), keys and the client by their number, objects by digest.
So writers never wait for each other in a circle. Each statement of the function has a snapshot
of its own, which is why the transaction must be READ COMMITTED: what is read behind a lock is
the newest.
"""

from __future__ import annotations

from typing import Final

TABLES_SQL: Final = """
CREATE TABLE {s}.meta (name text PRIMARY KEY, value text NOT NULL);

CREATE SEQUENCE {s}.object_ids;
CREATE SEQUENCE {s}.writes;

CREATE TABLE {s}.objects (
    id bigint PRIMARY KEY,
    digest bytea NOT NULL,
    kind smallint NOT NULL,
    codec smallint NOT NULL,
    size_bytes integer NOT NULL,
    stored_at_ms bigint NOT NULL,
    touched_at_ms bigint NOT NULL,
    epoch bigint NOT NULL,
    children bigint[] NOT NULL,
    content bytea NOT NULL,
    CONSTRAINT objects_by_digest UNIQUE (digest)
);
ALTER TABLE {s}.objects ALTER COLUMN content SET STORAGE EXTERNAL;

CREATE TABLE {s}.rows (
    kind smallint NOT NULL,
    key bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (kind, key)
) WITH (fillfactor = 80);

CREATE TABLE {s}.clients (
    client bytea PRIMARY KEY,
    number bigint NOT NULL,
    now_ms bigint NOT NULL,
    new_objects integer NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE {s}.watchers (watcher bytea PRIMARY KEY, until_ms bigint NOT NULL);

CREATE TABLE {s}.state (
    the_only boolean PRIMARY KEY DEFAULT true CHECK (the_only),
    epoch bigint NOT NULL,
    collector bytea,
    collector_until_ms bigint NOT NULL,
    writes_collected bigint NOT NULL,
    mark bytea
);
INSERT INTO {s}.state (epoch, collector_until_ms, writes_collected) VALUES (1, 0, 0);
"""

# Plans are made once a connection, maybe when a table is all but empty and reading all of it is
# cheapest; so it is said that everything is looked up by its key, however little there is. Costs
# that are out of the question would have statements compiled, each time (jit).
PLANNED_SQL: Final = """
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
"""

# Has a transaction that changes nothing last, and so all that it could see: what waits for the disk
# and for standbys is the end of a transaction that has written to the log, and a number alone, as
# pg_current_xact_id gives it one, is not written there.
FLUSHING_SQL: Final = "pg_logical_emit_message(true, 'casstore', ''::text)"

# The time, as the server has it; the tests of a store by another clock hand theirs over.
NOW_SQL: Final = """
CREATE FUNCTION {s}.now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS
    'SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint';
"""

# What it is told lies in two arrays, as ``request`` lays it out, and numbers beside them say how
# much there is of each and where: every array that a function is given costs as much as a look at
# a row, and every expression of a function is made ready anew in each transaction.
WRITE_SQL: Final = """
CREATE FUNCTION {s}.write(
    the_client bytea, the_number bigint, given_ms bigint, lasting boolean, locks bigint[],
    -- How many there are: conditions on rows and on objects, digests, objects, rows to put, stamps
    -- in them, rows to remove, objects to delete.
    asked integer, wanted integer, named integer, given integer, put integer, stamped integer,
    gone integer, deleted integer,
    -- Conditions on rows (4 each), objects (5), the order in which they were given, tables of
    -- rows to put, stamps (3), conditions on objects (2), tables of rows to remove, children.
    numbers bigint[], objects integer, orders integer, put_kinds integer, stamps integer,
    -- Digests, contents of objects, keys of conditions, their values, keys of rows to put, their
    -- values, keys of rows to remove, digests to delete.
    strings bytea[], op_keys integer, put_keys integer,
    OUT now_ms bigint, OUT new_objects integer, OUT failed integer, OUT actual bytea,
    OUT missing bytea, OUT epoch bigint, OUT watched boolean, OUT stored bigint[]
) LANGUAGE plpgsql VOLATILE {planned} SET plan_cache_mode = force_generic_plan AS $body$
#variable_conflict use_variable
DECLARE
    -- What was found out; as arrays of our own, each item of them is reached at once.
    last_number bigint;
    last_ms bigint;
    last_new integer;
    suspects integer[];
    suspect_values bytea[];
    name_places integer[];
    name_ids bigint[];
    is_stale boolean;
    is_watched boolean;
    number bigint;
    ids bigint[];
    fresh bigint[];
    at integer;
    step integer;
    place integer;
    failing integer;
    value bytea;
    expected bytea;
    due bytea;
    touch_before_ms bigint := -1;
    locked boolean;
    counted bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed'
        OR lasting = (current_setting('synchronous_commit') IN ('off', 'local'))
        OR locks[1] NOT IN ({store}, {inverted})
    THEN
        IF locks[1] NOT IN ({store}, {inverted}) THEN
            -- Those who know this store by its number would not wait for this one.
            RAISE EXCEPTION 'this is another store than the one that was opened'
                USING ERRCODE = '3F000';
        END IF;
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'a write runs as READ COMMITTED' USING ERRCODE = '25001';
        END IF;
        PERFORM set_config('synchronous_commit', CASE WHEN lasting THEN 'on' ELSE 'off' END, true);
    END IF;
    new_objects := 0;

    -- First the store: shared by writers, alone for those who must not find any under way. Then the
    -- keys that are asked for or change, in the order given; and among them the client: a write
    -- whose answer was lost is not made again, and not while it is under way. What is shared comes
    -- inverted. Asked whether it is null, a call is evaluated on the spot, and is no statement.
    FOREACH number IN ARRAY locks LOOP
        locked := CASE WHEN number < 0 THEN pg_advisory_xact_lock_shared(-1 - number) IS NULL
            ELSE pg_advisory_xact_lock(number) IS NULL END;
    END LOOP;

    -- All that is to be known, in one statement: it sees what was committed before the locks were
    -- ours.
    now_ms := coalesce(given_ms, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    IF put + gone = 0 THEN
        touch_before_ms := now_ms - {touch};
    END IF;
    SELECT s.epoch, c.number, c.now_ms, c.new_objects, f.places, f.found, n.at, n.ids, n.stale,
            EXISTS (SELECT 1 FROM {s}.watchers w WHERE w.until_ms > write.now_ms)
        INTO epoch, last_number, last_ms, last_new, suspects, suspect_values, name_places,
            name_ids, is_stale, is_watched
        FROM {s}.state s LEFT JOIN {s}.clients c ON c.client = the_client
        CROSS JOIN LATERAL (
            -- Rows that are not what they should be, and those of which more is to be said.
            SELECT array_agg(o.at) AS places, array_agg(r.value) AS found
                FROM generate_series(1, asked) AS o(at)
                LEFT JOIN {s}.rows r ON r.kind = numbers[4 * o.at - 1]
                    AND r.key = strings[op_keys + o.at]
                WHERE r.value IS DISTINCT FROM strings[op_keys + asked + o.at]
                    OR numbers[4 * o.at - 3] > 0
        ) f
        CROSS JOIN LATERAL (
            -- In any order: sorting takes longer than all the rest.
            SELECT array_agg(g.at) AS at, array_agg(o.id) AS ids,
                    bool_or(o.epoch < s.epoch OR o.touched_at_ms <= touch_before_ms) AS stale
                FROM generate_series(1, named) AS g(at)
                JOIN {s}.objects o ON o.digest = strings[g.at]
        ) n;
    IF last_number >= the_number THEN
        now_ms := last_ms;
        new_objects := last_new;
        epoch := NULL;
        IF lasting THEN
            -- It may have lost its connection while it waited for a standby, or for the disk.
            PERFORM {flushing};
        END IF;
        RETURN;
    END IF;
    FOR step IN 1 .. coalesce(cardinality(suspects), 0) LOOP
        at := suspects[step];
        value := suspect_values[step];
        expected := strings[op_keys + asked + at];
        -- A time is compared as eight bytes; where there are fewer it has always come.
        due := substr(value, 1 + numbers[4 * at]::integer, 8);
        CONTINUE WHEN coalesce(CASE numbers[4 * at - 3]
            WHEN 0 THEN false
            WHEN 1 THEN substr(value, 1, octet_length(expected)) = expected
            WHEN 2 THEN substr(value, 1, octet_length(expected)) = expected
                AND octet_length(due) = 8 AND due > int8send(now_ms)
            ELSE value = expected AND (octet_length(due) < 8 OR due <= int8send(now_ms))
        END, false);
        IF failing IS NULL OR at < failing THEN
            failing := at;
            failed := numbers[4 * at - 2];
            actual := value;
        END IF;
    END LOOP;
    IF failed IS NOT NULL AND wanted = 0 THEN
        RETURN;
    END IF;

    -- {{touch
    IF is_stale AND failed IS NULL THEN
        -- Everything relied upon carries the epoch from here on, and no collection of this
        -- epoch takes it; the next begins when we are through. Once an epoch for each object.
        -- What was found before may have gone meanwhile, so it is looked for again.
        UPDATE {s}.objects o
            SET epoch = write.epoch,
                touched_at_ms = CASE WHEN touch_before_ms < 0
                    THEN o.touched_at_ms ELSE write.now_ms END
            FROM (
                SELECT t.id FROM {s}.objects t
                    WHERE t.digest = ANY (strings[:named])
                        AND (t.epoch < write.epoch OR t.touched_at_ms <= touch_before_ms)
                    ORDER BY t.digest FOR NO KEY UPDATE
            ) found
            WHERE o.id = found.id;
        SELECT array_agg(g.at), array_agg(o.id) INTO name_places, name_ids
            FROM generate_series(1, named) AS g(at)
            JOIN {s}.objects o ON o.digest = strings[g.at];
    END IF;
    -- touch}}
    ids := array_fill(0::bigint, ARRAY[named]);
    FOR step IN 1 .. coalesce(cardinality(name_places), 0) LOOP
        ids[name_places[step]] := name_ids[step];
    END LOOP;
    IF wanted > 0 THEN
        FOR at IN 1 .. wanted LOOP
            IF failed IS NOT NULL AND numbers[stamps + 3 * stamped + 2 * at] > failed THEN
                EXIT;
            END IF;
            place := numbers[stamps + 3 * stamped + 2 * at - 1];
            IF ids[place] = 0 THEN
                missing := strings[place];
                RETURN;
            END IF;
        END LOOP;
        IF failed IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;

    -- Numbers are given in the order of the objects, after every child was found or numbered: it
    -- has the lower one. The first of the names are the objects', by digest.
    fresh := array_fill(0::bigint, ARRAY[given]);
    FOR step IN 1 .. given LOOP
        at := numbers[orders + step];
        CONTINUE WHEN ids[at] <> 0;
        FOR place IN numbers[objects + 5 * at - 1] .. numbers[objects + 5 * at] LOOP
            IF ids[numbers[place]] = 0 THEN
                missing := strings[numbers[place]];
                RETURN;
            END IF;
        END LOOP;
        number := nextval('{s}.object_ids');
        ids[at] := number;
        fresh[at] := number;
        new_objects := new_objects + 1;
    END LOOP;
    IF new_objects < given THEN
        stored := fresh;
    END IF;

    FOR at IN 1 .. stamped LOOP
        place := put_keys + put + numbers[stamps + 3 * at - 2];
        strings[place] := overlay(
            strings[place] PLACING int8send(greatest(0, now_ms + numbers[stamps + 3 * at]))
            FROM numbers[stamps + 3 * at - 1]::integer + 1
        );
    END LOOP;
    IF gone > 0 THEN
        DELETE FROM {s}.rows r USING generate_series(1, gone) AS g(at)
            WHERE r.kind = numbers[stamps + 3 * stamped + 2 * wanted + g.at]
                AND r.key = strings[put_keys + 2 * put + g.at];
    END IF;
    IF new_objects + put + gone + deleted = 0 THEN
        IF lasting AND given > 0 THEN
            -- They were stored by somebody who may not have waited until they last.
            PERFORM {flushing};
        END IF;
        RETURN;
    END IF;

    -- In order of digest, as they come and as all do. Whoever meets an object that another stored
    -- since we looked (a unique violation) begins anew: its number may be too high.
    WITH objects_put AS (
        INSERT INTO {s}.objects
            SELECT fresh[g.at], strings[g.at], numbers[objects + 5 * g.at - 4],
                    numbers[objects + 5 * g.at - 3], numbers[objects + 5 * g.at - 2],
                    now_ms, now_ms, epoch,
                    ARRAY(
                        SELECT ids[numbers[c.at]] FROM generate_series(
                            numbers[objects + 5 * g.at - 1], numbers[objects + 5 * g.at]
                        ) AS c(at)
                    ),
                    strings[named + g.at]
                FROM generate_series(1, given) AS g(at)
                WHERE fresh[g.at] > 0
    ), client_put AS (
        INSERT INTO {s}.clients AS c VALUES (the_client, the_number, now_ms, new_objects)
            ON CONFLICT (client) DO UPDATE SET number = excluded.number,
                now_ms = excluded.now_ms, new_objects = excluded.new_objects
    )
    INSERT INTO {s}.rows AS r
        SELECT numbers[put_kinds + g.at], strings[put_keys + g.at],
                strings[put_keys + put + g.at]
            FROM generate_series(1, put) AS g(at)
        ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value;
    IF deleted > 0 THEN
        DELETE FROM {s}.objects o USING (
            SELECT t.id FROM {s}.objects t
                WHERE t.digest = ANY (strings[put_keys + 2 * put + gone + 1 :])
                ORDER BY t.digest FOR UPDATE
        ) found WHERE o.id = found.id;
    END IF;
    counted := nextval('{s}.writes');
    watched := is_watched;
END
$body$;
"""

READ_SQL: Final = """
CREATE FUNCTION {s}.find_objects(digests bytea[])
    RETURNS TABLE (digest bytea, kind smallint, codec smallint, size_bytes integer, content bytea)
    LANGUAGE plpgsql STABLE {planned} AS $body$
BEGIN
    RETURN QUERY SELECT o.digest, o.kind, o.codec, o.size_bytes, o.content
        FROM {s}.objects o WHERE o.digest = ANY (digests);
END
$body$;

CREATE FUNCTION {s}.find_digests(digests bytea[]) RETURNS SETOF bytea
    LANGUAGE plpgsql STABLE {planned} AS $body$
BEGIN
    RETURN QUERY SELECT o.digest FROM {s}.objects o WHERE o.digest = ANY (digests);
END
$body$;

CREATE FUNCTION {s}.find_rows(kinds integer[], keys bytea[])
    RETURNS TABLE (kind smallint, key bytea, value bytea)
    LANGUAGE plpgsql STABLE {planned} AS $body$
BEGIN
    RETURN QUERY SELECT r.kind, r.key, r.value FROM unnest(kinds, keys) AS w(kind, key)
        JOIN {s}.rows r ON r.kind = w.kind AND r.key = w.key;
END
$body$;
"""

# How long after a put the next one of the same object says nothing new.
TOUCH_INTERVAL_MS: Final = 60_000

BEGIN_SQL: Final = """
CREATE FUNCTION {s}.begin_collection(
    the_store bigint, the_collector bytea, given_ms bigint, lasts_ms bigint
) RETURNS bigint LANGUAGE plpgsql VOLATILE SET lock_timeout = '2s' AS $body$
DECLARE
    the_epoch bigint;
BEGIN
    IF the_store <> {store} THEN
        RAISE EXCEPTION 'this is another store than the one that was opened'
            USING ERRCODE = '3F000';
    END IF;
    -- Asked again because the answer was lost: it has begun.
    SELECT epoch INTO the_epoch FROM {s}.state WHERE collector = the_collector;
    IF FOUND THEN
        RETURN the_epoch;
    END IF;
    IF EXISTS (
        SELECT 1 FROM {s}.state WHERE collector IS NOT NULL
            AND collector_until_ms > coalesce(given_ms, {s}.now_ms())
    ) THEN
        RETURN NULL;
    END IF;
    -- When nobody is writing: who writes from here on carries the new epoch, and what was written
    -- under an older one is there for the marking to see.
    PERFORM pg_advisory_xact_lock(the_store);
    UPDATE {s}.state SET epoch = epoch + 1, collector = the_collector,
            collector_until_ms = coalesce(given_ms, {s}.now_ms()) + lasts_ms
        WHERE collector IS NULL OR collector_until_ms <= coalesce(given_ms, {s}.now_ms())
        RETURNING epoch INTO the_epoch;
    RETURN the_epoch;
END
$body$;
"""

SWEEP_SQL: Final = """
CREATE FUNCTION {s}.sweep(
    the_collector bytea, given_ms bigint, lasts_ms bigint, the_epoch bigint,
    ids bigint[], spared bigint[],
    OUT overtaken boolean, OUT swept bytea[], OUT size_bytes bigint, OUT freed_bytes bigint,
    OUT reached bigint[], OUT held_s double precision
) LANGUAGE plpgsql VOLATILE {planned} AS $body$
DECLARE
    kept bigint[];
    began timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a sweep runs as READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    UPDATE {s}.state SET collector_until_ms = coalesce(given_ms, {s}.now_ms()) + lasts_ms
        WHERE collector = the_collector;
    overtaken := NOT FOUND;
    IF overtaken THEN
        RETURN;
    END IF;
    -- All of them are locked before any of them is judged. Whoever relies on one has left the
    -- epoch there by now, or waits, and will find it gone.
    began := clock_timestamp();
    SELECT array_agg(l.id) FILTER (WHERE l.epoch >= the_epoch OR l.id = ANY (spared)) INTO kept
        FROM (
            SELECT t.id, t.epoch FROM {s}.objects t
                WHERE t.id = ANY (ids) ORDER BY t.digest FOR UPDATE
        ) l;
    IF kept IS NOT NULL THEN
        -- What somebody relies on keeps all it links to, here and in what is still to come.
        WITH RECURSIVE living(id) AS (
            SELECT unnest(kept)
            UNION
            SELECT c.id FROM living k JOIN {s}.objects o ON o.id = k.id
                CROSS JOIN LATERAL unnest(o.children) AS c(id)
                WHERE c.id = ANY (ids)
        )
        SELECT array_agg(k.id) INTO kept FROM living k;
        SELECT array_agg(DISTINCT c.id) INTO reached
            FROM {s}.objects o CROSS JOIN LATERAL unnest(o.children) AS c(id)
            WHERE o.id = ANY (kept);
    END IF;
    WITH gone AS (
        DELETE FROM {s}.objects o
            WHERE o.id = ANY (ids) AND NOT o.id = ANY (coalesce(kept, ARRAY[]::bigint[]))
            RETURNING o.digest, o.size_bytes, octet_length(o.content) AS stored_bytes
    )
    SELECT array_agg(g.digest), coalesce(sum(g.size_bytes), 0), coalesce(sum(g.stored_bytes), 0)
        INTO swept, size_bytes, freed_bytes FROM gone g;
    held_s := extract(epoch FROM clock_timestamp() - began);
END
$body$;
"""

#: All functions. They name the schema that they were made in, wherever they are, and the number
#: of their store.
FUNCTIONS: Final = (NOW_SQL, READ_SQL, WRITE_SQL, BEGIN_SQL, SWEEP_SQL)
#: Everything that makes a store of an empty schema, in order.
CREATION: Final = (TABLES_SQL, *FUNCTIONS)
