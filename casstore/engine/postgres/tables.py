"""The SQL of a store: its tables and the functions that change them.

    objects     digest → id, kind, children by id, compressed content; when it was stored and last
                put again; its epoch: the newest collection during which a write relied on it
    rows        (table, key) → value, all of them bytes: no collation, no locale
    clients     the number and result of each client connection's last write: a retry of that write
                returns the result, so that no write runs twice
    watchers    registered listeners, which need notifications of writes
    state       one row: the epoch, the running collector, the mark of the last check
    meta        family, version, number of the store

``{s}`` is replaced by the schema, quoted as an identifier; nothing else is inserted as text.

Every change to a store goes through the function ``write``, except sweeping. All transactions
take locks in the same order: the store (shared), keys and client by lock number, objects by
digest. So writers cannot deadlock. The transaction must be READ COMMITTED: then each statement of
the function has a new snapshot, and a read after taking a lock sees the latest commit.
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

# Plans are made once per connection, perhaps while a table is almost empty and a sequential scan is
# cheapest. So sequential scans and joins that need them are disabled. The server disables them by a
# huge cost, which would trigger jit compilation each time, so jit is off.
PLANNED_SQL: Final = """
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
"""

# Writes a WAL record, so that the commit of a transaction without changes waits for the disk and
# for standbys: then everything that the transaction could see is durable, too. Assigning a
# transaction id with pg_current_xact_id would not do: it writes no WAL.
FLUSHING_SQL: Final = "pg_logical_emit_message(true, 'casstore', ''::text)"

# The server's clock. Functions take ``given_ms`` instead, unless it is NULL: the clock of a test.
NOW_SQL: Final = """
CREATE FUNCTION {s}.now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS
    'SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint';
"""

# The parameters are two arrays (see ``request``), and numbers that say how many items of each kind
# there are and where. Each array parameter costs as much as reading a row, and each expression of a
# function is prepared again in each transaction.
WRITE_SQL: Final = """
CREATE FUNCTION {s}.write(
    the_client bytea, the_number bigint, given_ms bigint, lasting boolean, locks bigint[],
    -- Counts: conditions on rows and on objects, digests, objects, rows to put, stamps in them,
    -- rows to delete, objects to delete.
    asked integer, wanted integer, named integer, given integer, put integer, stamped integer,
    gone integer, deleted integer,
    -- Conditions on rows (4 numbers each), objects (5), the order of the objects, tables of rows
    -- to put, stamps (3), conditions on objects (2), tables of rows to delete, children.
    numbers bigint[], objects integer, orders integer, put_kinds integer, stamps integer,
    -- Digests, contents of objects, keys of conditions, their values, keys of rows to put, their
    -- values, keys of rows to delete, digests to delete.
    strings bytea[], op_keys integer, put_keys integer,
    OUT now_ms bigint, OUT new_objects integer, OUT failed integer, OUT actual bytea,
    OUT missing bytea, OUT epoch bigint, OUT watched boolean, OUT stored bigint[]
) LANGUAGE plpgsql VOLATILE {planned} SET plan_cache_mode = force_generic_plan AS $body$
#variable_conflict use_variable
DECLARE
    -- Results of the look-ups. Access to an item of a local array takes constant time.
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
            -- Clients of the other store use other lock numbers, so they would not wait.
            RAISE EXCEPTION 'this is another store than the one that was opened'
                USING ERRCODE = '3F000';
        END IF;
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'a write runs as READ COMMITTED' USING ERRCODE = '25001';
        END IF;
        PERFORM set_config('synchronous_commit', CASE WHEN lasting THEN 'on' ELSE 'off' END, true);
    END IF;
    new_objects := 0;

    -- First the store's lock: shared by writers, exclusive for a collection that begins. Then the
    -- keys that are checked or changed, and the client, in the order given. The client's lock
    -- makes a retry wait for the first attempt, so that the write runs once. The number of a
    -- shared lock is inverted. IS NULL makes the call a simple expression, which is faster than
    -- a statement.
    FOREACH number IN ARRAY locks LOOP
        locked := CASE WHEN number < 0 THEN pg_advisory_xact_lock_shared(-1 - number) IS NULL
            ELSE pg_advisory_xact_lock(number) IS NULL END;
    END LOOP;

    -- All look-ups in one statement: its snapshot is taken after the locks, so it sees every
    -- commit of their earlier holders.
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
            -- Rows that fail their condition, and rows that need a further check.
            SELECT array_agg(o.at) AS places, array_agg(r.value) AS found
                FROM generate_series(1, asked) AS o(at)
                LEFT JOIN {s}.rows r ON r.kind = numbers[4 * o.at - 1]
                    AND r.key = strings[op_keys + o.at]
                WHERE r.value IS DISTINCT FROM strings[op_keys + asked + o.at]
                    OR numbers[4 * o.at - 3] > 0
        ) f
        CROSS JOIN LATERAL (
            -- Unordered: sorting would take longer than everything else.
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
            -- The first attempt may have lost its connection while it waited for the flush or for
            -- a standby.
            PERFORM {flushing};
        END IF;
        RETURN;
    END IF;
    FOR step IN 1 .. coalesce(cardinality(suspects), 0) LOOP
        at := suspects[step];
        value := suspect_values[step];
        expected := strings[op_keys + asked + at];
        -- A time is compared as eight bytes; a shorter value counts as lapsed.
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
        -- Set the epoch on every object that this write relies on, once per epoch and object: no
        -- collection of this epoch removes it, and the next collection begins after this write.
        -- An object found above may have been removed since, so it is looked up again.
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

    -- Ids are assigned in the order of the objects, after every child was found or has its id: so
    -- a child's id is lower. The list of digests begins with those of the objects, sorted.
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
            -- Another client stored the objects, perhaps without waiting for the flush.
            PERFORM {flushing};
        END IF;
        RETURN;
    END IF;

    -- In the order of digests, like all writers. If another write stored one of the objects since
    -- the look-up (a unique violation), this write is retried: that object's id may be too high.
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

# An object that was put less than this time ago is not touched when it is put again.
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
    -- A retry of a call whose answer was lost: the collection has begun.
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
    -- The exclusive lock waits for all running writes. Later writes use the new epoch, and the
    -- marking sees all earlier ones.
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
    -- All of them are locked before any decision. A write that relies on one of them has set the
    -- epoch by now, or waits for the lock and will find the object gone.
    began := clock_timestamp();
    SELECT array_agg(l.id) FILTER (WHERE l.epoch >= the_epoch OR l.id = ANY (spared)) INTO kept
        FROM (
            SELECT t.id, t.epoch FROM {s}.objects t
                WHERE t.id = ANY (ids) ORDER BY t.digest FOR UPDATE
        ) l;
    IF kept IS NOT NULL THEN
        -- An object that is kept keeps everything it links to, in this step and in later ones.
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

#: All functions. They contain the name of the schema that they were created in, and the number of
#: their store.
FUNCTIONS: Final = (NOW_SQL, READ_SQL, WRITE_SQL, BEGIN_SQL, SWEEP_SQL)
#: All statements that create a store in an empty schema, in order.
CREATION: Final = (TABLES_SQL, *FUNCTIONS)
