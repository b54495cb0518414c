"""The command line on a store on a server: what works, and what says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore.cli.naming import split_store
from casstore.store import shown_place
from servers.postgres import Server
from tests.cli.running import HOSTILE, fill, run


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store in a directory. Nobody may change it."""
    place = tmp_path_factory.mktemp("laptop") / "store"
    fill(place)
    return str(place)


@pytest.fixture
def team(postgres_url: str, laptop: str) -> str:
    """The same on a server."""
    run("copy", laptop, postgres_url, "--create")
    return postgres_url


def test_init_creates_a_store_on_a_server_and_finds_an_existing_one(postgres_url: str) -> None:
    assert run("sessions", store=postgres_url, ends=4).err.startswith("error: ")
    made = run("init", "--json", store=postgres_url).json
    assert (made["created"], made["path"]) == (True, shown_place(postgres_url))
    assert run("init", postgres_url, "--json").json["created"] is False
    assert "already" in run("init", store=postgres_url).out
    assert run("sessions", "--json", store=postgres_url).json["sessions"] == []
    run("init", "--lmdb-version", "1", store=postgres_url, ends=3)


# Without times relative to now.
LOOKING = (
    ("sessions", "--json"),
    ("show", "agent", "--json"),
    ("show", "agent@5", "--path", "tool_state.files"),
    ("log", "agent", "--json"),
    ("log", "--graph", "agent", "--json"),
    ("history", "agent", "--json"),
    ("diff", "agent", "other"),
    ("diff", "agent", "agent~3", "--stat"),
    ("cat", "text"),
    ("prune", "--last", "2", "--dry-run"),
)


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_read_commands_print_the_same_as_for_a_directory(
    team: str, laptop: str, words: tuple[str, ...]
) -> None:
    assert run(*words, store=team).out == run(*words, store=laptop).out


def test_stores_are_compared_across_engines(team: str, laptop: str) -> None:
    assert "the same" in run("diff", "agent", f"{team}::agent", store=laptop).out
    assert "the same" in run("diff", f"{team}::agent", f"{laptop}::agent").out
    found = run("diff", "agent", f"{team}::other", "--json", store=laptop).json
    assert found["new"]["store"] == shown_place(team)


def test_maintenance_commands_work_on_a_store_on_a_server(team: str, tmp_path: Path) -> None:
    assert "sound" in run("check", "--level", "full", store=team).out
    run("fork", "agent", "mine", store=team)
    run("tag", "now", "agent", store=team)
    with casstore.open(team) as store:
        store.delete_session("third")
        store.put_blob(b"nobody names this" * 100)
    planned = run("gc", "--dry-run", "--grace", "0", "--json", store=team).json
    assert planned["objects_unreached"] > 0
    swept = run("gc", "--grace", "0", "--json", store=team).json
    assert swept["objects_swept"] == planned["objects_unreached"]
    run("prune", "--last", "3", "--yes", store=team)
    run("vacuum", "--grace", "0", store=team)
    assert run("check", "--level", "full", "--json", store=team).json["sound"] is True
    file = str(tmp_path / "agent.bundle")
    run("export", "agent", file, store=team)
    assert "imported: theirs" in run("import", "bundle", file, "--name", "theirs", store=team).out
    run("backup", str(tmp_path / "backup"), store=team)
    assert "the same" in run("diff", "agent", f"{team}::agent", store=str(tmp_path / "backup")).out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("pack",), "only a store on LMDB has slabs"),
        (("compact",), "VACUUM FULL"),
        (("stats",), "no file to measure"),
        (("rebuild",), "nothing to be rebuilt"),
    ],
)
def test_commands_for_files_explain_why_a_store_on_a_server_is_refused(
    team: str, words: tuple[str, ...], named: str
) -> None:
    ended = run(*words, store=team, ends=3)
    assert named in ended.err
    assert run("check", store=team)


def test_salvage_and_backup_refuse_a_url_and_suggest_copy(
    team: str, laptop: str, tmp_path: Path
) -> None:
    assert "casstore copy" in run("salvage", team, str(tmp_path / "x"), ends=3).err
    assert "casstore copy" in run("backup", team, store=laptop, ends=3).err
    assert list(tmp_path.iterdir()) == []


def test_a_copy_works_both_ways_and_sends_only_missing_objects(
    team: str, laptop: str, tmp_path: Path
) -> None:
    again = run("copy", laptop, team, "--json").json
    assert (again["sessions"], again["new_objects"], again["rows"]) == (0, 0, 0)
    back = str(tmp_path / "back")
    run("copy", team, back, "--create")
    for name in ("agent", "other", "third"):
        assert "the same" in run("diff", name, f"{back}::{name}", store=laptop).out
    assert HOSTILE in [one["id"] for one in run("sessions", "--json", store=back).json["sessions"]]
    one = str(tmp_path / "one")
    assert run("copy", team, one, "--session", "other", "--create", "--json").json["sessions"] == 1
    assert "the same" in run("diff", "other", f"{one}::other", store=team).out
    run("copy", team, str(tmp_path / "nowhere"), ends=4)


def test_tools_gc_takes_urls(team: str, tmp_path: Path) -> None:
    from casstore.cli.configuration import Steps, find_stores
    from casstore.cli.maintain import maintain_store

    assert find_stores([team, team]) == [team]
    done = maintain_store(team, Steps(grace_ms=0, vacuum=True), dry_run=False)
    assert done.exit_code == 0, done.summary
    assert done.path == shown_place(team)


@pytest.mark.parametrize(
    ("text", "place", "rest"),
    [
        ("postgresql://h/db::agent", "postgresql://h/db", "agent"),
        ("postgresql://[::1]:1/db?schema=x::a::b]", "postgresql://[::1]:1/db?schema=x", "a::b]"),
        ("postgresql://[::1]/db", None, "postgresql://[::1]/db"),
        ("postgresql://h", None, "postgresql://h"),
    ],
)  # fmt: skip
def test_split_store_separates_a_url_from_the_name_in_the_store(
    text: str, place: str | None, rest: str
) -> None:
    assert split_store(text) == (place, rest)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("my-store", "my-store"),
        ("postgresql://me:secret@h:1/db", "postgresql://me@h:1/db"),
        ("postgresql://h/db?password=secret&schema=x", "postgresql://h/db?schema=x"),
        ("postgresql://h/db?sslpassword=secret", "postgresql://h/db"),
        ("postgres://a,b/db?schema=x", "postgres://a,b/db?schema=x"),
        ("postgresql://me:sec?ret#@h/db?schema=x", "postgresql://me@h/db?schema=x"),
        ("postgresql://me:sec/ret@h/db", "postgresql://me@h/db"),
        ("postgresql:///db", "postgresql:///db"),
    ],
)
def test_passwords_are_not_shown(place: str, shown: str) -> None:
    assert shown_place(place) == shown


def test_a_password_in_the_url_is_in_no_answer_and_no_error(
    postgres_server: Server, schema: str
) -> None:
    url = postgres_server.url(schema=schema).replace("postgres@", "postgres:hush@")
    ended = run("sessions", store=url, ends=4)
    assert "hush" not in ended.out + ended.err
    made = run("init", "--json", store=url)
    assert "hush" not in made.out + made.err
    nowhere = "postgresql://me:hush@127.0.0.1:1/db?patience=0&connect_timeout=2"
    ended = run("sessions", store=nowhere, ends=None)
    assert ended.code not in (0, 70)
    assert "hush" not in ended.out + ended.err


def test_an_unreachable_server_is_reported_as_such_and_not_as_a_disk_error() -> None:
    said = run("sessions", store="postgresql://127.0.0.1:1/nothing?patience=0", ends=10).err
    assert "check that the server can be reached" in said
