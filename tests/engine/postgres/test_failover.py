"""The primary lost under agents, sampled; ``tools/torture.py failover`` loses it by the dozen."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg")

from campaigns import failover
from servers.postgres import Server
from servers.replication import Cluster


def test_a_failover_loses_no_acknowledged_call(postgres_server: Server) -> None:
    with tempfile.TemporaryDirectory(prefix="casstore-failover-") as scratch:
        report = failover.run(Path(scratch), count=1, seed=3)
    assert report.findings == ()
    assert report.kept()
    assert report.notes
    assert report.total("primaries killed") == 1
    assert report.total("sound") == 1
    assert report.total("calls acknowledged") > 20


def test_the_most_advanced_standby_is_promoted_and_unreplicated_data_is_lost(
    postgres_server: Server,
) -> None:
    """Or else the campaign would prove nothing."""
    with Cluster(postgres_server.installation) as cluster:
        first, second = cluster.standbys()
        with psycopg.connect(cluster.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE told (number int)")
            cluster.stop_feeding(second)
            for number in range(5):
                connection.execute("INSERT INTO told VALUES (%s)", (number,))
            cluster.stop_feeding(first)
            # Answered without waiting for anybody.
            connection.execute("SET synchronous_commit = local")
            connection.execute("INSERT INTO told VALUES (99)")
        before = cluster.primary
        cluster.fail_over()
        assert cluster.primary is not before
        with psycopg.connect(cluster.url()) as connection:
            rows = connection.execute("SELECT number FROM told ORDER BY number").fetchall()
        assert [number for (number,) in rows] == [0, 1, 2, 3, 4]
