-- A store of version 1, as casstore made it; {s} is its schema.
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

CREATE FUNCTION {s}.now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS
    'SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint';

CREATE FUNCTION {s}.find_objects(digests bytea[])
    RETURNS TABLE (digest bytea, kind smallint, codec smallint, size_bytes integer, content bytea)
    LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $body$
BEGIN
    RETURN QUERY SELECT o.digest, o.kind, o.codec, o.size_bytes, o.content
        FROM {s}.objects o WHERE o.digest = ANY (digests);
END
$body$;

CREATE FUNCTION {s}.find_digests(digests bytea[]) RETURNS SETOF bytea
    LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $body$
BEGIN
    RETURN QUERY SELECT o.digest FROM {s}.objects o WHERE o.digest = ANY (digests);
END
$body$;

CREATE FUNCTION {s}.find_rows(kinds integer[], keys bytea[])
    RETURNS TABLE (kind smallint, key bytea, value bytea)
    LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $body$
BEGIN
    RETURN QUERY SELECT r.kind, r.key, r.value FROM unnest(kinds, keys) AS w(kind, key)
        JOIN {s}.rows r ON r.kind = w.kind AND r.key = w.key;
END
$body$;

CREATE FUNCTION {s}.write(
    the_store bigint, the_client bytea, the_number bigint, given_ms bigint, lasting boolean,
    alone boolean, locks bigint[], shared integer[],
    ops integer[], op_places integer[], op_kinds integer[], op_keys bytea[], op_values bytea[],
    op_offsets integer[],
    names bytea[], wanted integer[], wanted_places integer[],
    objects integer[], digests bytea[], kinds integer[], codecs integer[], sizes integer[],
    starts integer[], ends integer[], children integer[], contents bytea[],
    put_kinds integer[], put_keys bytea[], put_values bytea[],
    stamp_rows integer[], stamp_offsets integer[], stamp_adds bigint[],
    gone_kinds integer[], gone_keys bytea[], deletes bytea[],
    OUT now_ms bigint, OUT new_objects integer, OUT failed integer, OUT actual bytea,
    OUT missing bytea, OUT epoch bigint, OUT watched boolean, OUT fresh bigint[]
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $body$
#variable_conflict use_variable
DECLARE
    known record;
    ids bigint[];
    stale boolean;
    at integer;
    place integer;
    inserted integer;
    touch_before_ms bigint;
    locked boolean;
    counted bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a write runs as READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    IF NOT lasting THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    ELSIF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    new_objects := 0;

    -- The store: shared by writers, alone for those who must not find any under way. Asked whether
    -- it is null, a call is evaluated on the spot, and is no statement of its own.
    IF alone THEN
        locked := pg_advisory_xact_lock(the_store) IS NULL;
    ELSE
        locked := pg_advisory_xact_lock_shared(the_store) IS NULL;
    END IF;
    -- The keys that are asked for or change, in the order given; and among them the client: a
    -- write whose answer was lost is not made again, and not while it is under way.
    SELECT count(CASE WHEN l.shared = 1 THEN pg_advisory_xact_lock_shared(l.number) IS NULL
            ELSE pg_advisory_xact_lock(l.number) IS NULL END) INTO counted
        FROM unnest(locks, shared) AS l(number, shared);

    now_ms := coalesce(given_ms, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    SELECT s.epoch, c.number, c.now_ms, c.new_objects,
            EXISTS (SELECT 1 FROM {s}.watchers w WHERE w.until_ms > write.now_ms) AS watched
        INTO known
        FROM {s}.state s LEFT JOIN {s}.clients c ON c.client = the_client;
    IF known.number >= the_number THEN
        now_ms := known.now_ms;
        new_objects := known.new_objects;
        RETURN;
    END IF;
    epoch := known.epoch;

    IF cardinality(ops) > 0 THEN
        SELECT c.place, r.value INTO failed, actual
            FROM unnest(ops, op_places, op_kinds, op_keys, op_values, op_offsets)
                AS c(op, place, kind, key, value, starts)
            LEFT JOIN {s}.rows r ON r.kind = c.kind AND r.key = c.key
            WHERE NOT coalesce(CASE c.op
                WHEN 0 THEN r.value IS NOT DISTINCT FROM c.value
                WHEN 1 THEN substr(r.value, 1, octet_length(c.value)) = c.value
                -- A time is compared as eight bytes; where there are fewer it has always come.
                WHEN 2 THEN substr(r.value, 1, octet_length(c.value)) = c.value
                    AND octet_length(substr(r.value, c.starts + 1, 8)) = 8
                    AND substr(r.value, c.starts + 1, 8) > int8send(now_ms)
                ELSE r.value = c.value
                    AND (octet_length(substr(r.value, c.starts + 1, 8)) < 8
                        OR substr(r.value, c.starts + 1, 8) <= int8send(now_ms))
            END, false)
            ORDER BY c.place LIMIT 1;
        IF failed IS NOT NULL AND cardinality(wanted) = 0 THEN
            RETURN;
        END IF;
    END IF;

    IF cardinality(names) > 0 THEN
        touch_before_ms := CASE WHEN cardinality(put_kinds) + cardinality(gone_kinds) = 0
            THEN now_ms - 60000 ELSE -1 END;
        SELECT array_agg(coalesce(o.id, 0) ORDER BY n.place),
                bool_or(o.epoch < write.epoch OR o.touched_at_ms <= touch_before_ms)
            INTO ids, stale
            FROM unnest(names) WITH ORDINALITY AS n(digest, place)
            LEFT JOIN {s}.objects o ON o.digest = n.digest;
        -- {touch
        IF stale AND failed IS NULL THEN
            -- Everything relied upon carries the epoch from here on, and no collection of this
            -- epoch takes it; the next begins when we are through. Once an epoch for each object.
            -- What was found before may have gone meanwhile, so it is looked for again.
            UPDATE {s}.objects o
                SET epoch = write.epoch,
                    touched_at_ms = CASE WHEN touch_before_ms < 0
                        THEN o.touched_at_ms ELSE write.now_ms END
                FROM (
                    SELECT t.id FROM {s}.objects t
                        WHERE t.digest = ANY (names)
                            AND (t.epoch < write.epoch OR t.touched_at_ms <= touch_before_ms)
                        ORDER BY t.digest FOR NO KEY UPDATE
                ) found
                WHERE o.id = found.id;
            SELECT array_agg(coalesce(o.id, 0) ORDER BY n.place) INTO ids
                FROM unnest(names) WITH ORDINALITY AS n(digest, place)
                LEFT JOIN {s}.objects o ON o.digest = n.digest;
        END IF;
        -- touch}
        FOR at IN 1 .. cardinality(wanted) LOOP
            IF failed IS NOT NULL AND wanted_places[at] > failed THEN
                EXIT;
            END IF;
            IF ids[wanted[at]] = 0 THEN
                missing := names[wanted[at]];
                RETURN;
            END IF;
        END LOOP;
        IF failed IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;

    -- Numbers are given in order, after every child was found or numbered: it has the lower one.
    IF cardinality(objects) > 0 THEN
        fresh := array_fill(0::bigint, ARRAY[cardinality(objects)]);
        FOR at IN 1 .. cardinality(objects) LOOP
            IF ids[objects[at]] = 0 THEN
                FOR place IN starts[at] .. ends[at] LOOP
                    IF ids[children[place]] = 0 THEN
                        missing := names[children[place]];
                        RETURN;
                    END IF;
                END LOOP;
                ids[objects[at]] := nextval('{s}.object_ids');
                fresh[at] := ids[objects[at]];
                new_objects := new_objects + 1;
            END IF;
        END LOOP;
        IF new_objects > 0 THEN
            INSERT INTO {s}.objects
                SELECT n.id, n.digest, n.kind, n.codec, n.size_bytes, now_ms, now_ms, epoch,
                    CASE WHEN n.first > n.last THEN ARRAY[]::bigint[]
                        ELSE ARRAY(SELECT ids[c] FROM unnest(children[n.first : n.last]) c) END,
                    n.content
                FROM unnest(fresh, digests, kinds, codecs, sizes, starts, ends, contents)
                    AS n(id, digest, kind, codec, size_bytes, first, last, content)
                WHERE n.id > 0
                ORDER BY n.digest
                ON CONFLICT (digest) DO NOTHING;
            GET DIAGNOSTICS inserted = ROW_COUNT;
            IF inserted < new_objects THEN
                -- Another stored one of them since we looked, under a number that may be too high.
                RAISE EXCEPTION 'stored by another at the same time' USING ERRCODE = '40001';
            END IF;
        END IF;
    END IF;

    FOR at IN 1 .. cardinality(stamp_rows) LOOP
        place := stamp_rows[at];
        put_values[place] := overlay(
            put_values[place] PLACING int8send(greatest(0, now_ms + stamp_adds[at]))
            FROM stamp_offsets[at] + 1
        );
    END LOOP;
    IF cardinality(put_kinds) > 0 THEN
        INSERT INTO {s}.rows AS r
            SELECT * FROM unnest(put_kinds, put_keys, put_values)
            ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value;
    END IF;
    IF cardinality(gone_kinds) > 0 THEN
        DELETE FROM {s}.rows r USING unnest(gone_kinds, gone_keys) AS g(kind, key)
            WHERE r.kind = g.kind AND r.key = g.key;
    END IF;
    IF cardinality(deletes) > 0 THEN
        DELETE FROM {s}.objects o USING (
            SELECT t.id FROM {s}.objects t
                WHERE t.digest = ANY (deletes) ORDER BY t.digest FOR UPDATE
        ) found WHERE o.id = found.id;
    END IF;

    IF new_objects + cardinality(put_kinds) + cardinality(gone_kinds) + cardinality(deletes) > 0
    THEN
        counted := nextval('{s}.writes');
        INSERT INTO {s}.clients AS c VALUES (the_client, the_number, now_ms, new_objects)
            ON CONFLICT (client) DO UPDATE SET number = excluded.number,
                now_ms = excluded.now_ms, new_objects = excluded.new_objects;
        watched := known.watched;
    END IF;
END
$body$;

CREATE FUNCTION {s}.begin_collection(
    the_store bigint, the_collector bytea, given_ms bigint, lasts_ms bigint
) RETURNS bigint LANGUAGE plpgsql VOLATILE SET lock_timeout = '2s' AS $body$
DECLARE
    the_epoch bigint;
BEGIN
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

CREATE FUNCTION {s}.sweep(
    the_collector bytea, given_ms bigint, lasts_ms bigint, the_epoch bigint,
    ids bigint[], spared bigint[],
    OUT overtaken boolean, OUT swept bytea[], OUT size_bytes bigint, OUT freed_bytes bigint,
    OUT reached bigint[], OUT held_s double precision
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $body$
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
