"""TLS: what the URL says reaches libpq, and a server that is not who it says is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore import Commit, NodeDraft
from casstore.errors import StorageError
from servers import certificates
from servers.postgres import THROWN_AWAY, NoPostgres, Server, installations


class Secure(NamedTuple):
    """A server that speaks TLS, and whom to trust."""

    server: Server
    authority: Path
    stranger: Path

    def url(self, host: str = "localhost", **parameters: str) -> str:
        words = {"sslmode": "verify-full", "sslrootcert": str(self.authority), **parameters}
        query = "&".join(f"{name}={value}" for name, value in words.items())
        return f"postgresql://postgres@{host}:{self.server.port}/postgres?patience=3600&{query}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    if certificates.openssl() is None:
        pytest.skip("needs the program openssl")
    # The wheel's server is built without TLS; Debian's has it.
    for installation in reversed(installations()):
        server = Server(installation, tcp=True)
        try:
            server.create()
            made = certificates.make(server.place, host="localhost", owner=server.user)
            server.settings = {
                **THROWN_AWAY,
                "ssl": "on",
                "ssl_cert_file": str(made.certificate),
                "ssl_key_file": str(made.key),
            }
            server.start()
        except NoPostgres:
            server.remove()
            continue
        elsewhere = tmp_path_factory.mktemp("stranger")
        stranger = certificates.make(elsewhere, host="localhost", owner=None)
        yield Secure(server, made.authority, stranger.authority)
        server.remove()
        return
    pytest.skip("needs a PostgreSQL that speaks TLS: Debian's package postgresql")


def test_a_store_over_tls_with_a_proven_server(secure: Secure) -> None:
    with casstore.open(secure.url()) as store:
        session = store.session("s")
        session.commit(Commit(append=[NodeDraft("a", "a")]))
        assert [node.id for node in session.nodes()] == ["a"]
        with psycopg.connect(secure.url().replace("patience=3600&", "")) as connection:
            rows = connection.execute(
                "SELECT s.ssl FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) "
                "WHERE a.backend_type = 'client backend'"
            ).fetchall()
    assert len(rows) >= 2
    assert set(rows) == {(True,)}


def test_a_server_certificate_with_another_host_name_or_authority_is_refused(
    secure: Secure,
) -> None:
    with pytest.raises(StorageError, match="does not match host name"):
        casstore.open(secure.url("127.0.0.1"))
    with pytest.raises(StorageError, match="certificate verify failed"):
        casstore.open(secure.url(sslrootcert=str(secure.stranger)))
    # Without proof it is let in: that the parameters arrive is what made the difference.
    with casstore.open(secure.url("127.0.0.1", sslmode="require", sslrootcert="")) as store:
        assert list(store.sessions()) is not None


def test_a_server_without_tls_is_refused_if_sslmode_is_require(postgres_server: Server) -> None:
    with Server(postgres_server.installation, tcp=True) as plain:
        url = plain.url(tcp=True, sslmode="require", patience="3600")
        with pytest.raises(StorageError, match="SSL"):
            casstore.open(url)
