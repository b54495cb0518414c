"""What names mean, what they do not, and what an error says of those that mean two things."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import casstore
from casstore import Commit, NodeDraft, Store
from casstore.cli.naming import AmbiguousNameError, NameNotFoundError, resolve, split_store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Listing
from casstore.errors import InvalidInputError, NotFoundError, SessionDeletedError
from tests.cli.running import HOSTILE, run


@pytest.fixture(scope="module")
def store() -> Store:
    made = Store(MemoryEngine())
    for session, commits in (("agent", 5), ("agent@3", 1), ("age#of", 1), ("a~b", 2)):
        for turn in range(commits):
            draft = NodeDraft(f"n{turn}", {"session": session})
            made.session(session).commit(Commit(append=[draft]))
    made.session("agent").label("good", 2)
    made.session("agent").label("7", 4)
    made.session("agent").label("a@b", 1)
    made.create_session("empty")
    made.tag("rel", made.session("agent").entry(1).manifest)
    return made


@pytest.mark.parametrize(
    ("text", "kind", "session", "revision"),
    [
        ("agent", "session", "agent", 5),
        ("agent@2", "revision", "agent", 2),
        ("agent@5", "revision", "agent", 5),
        ("agent@good", "revision", "agent", 2),
        ("agent@7", "revision", "agent", 4),
        ("agent@a@b", "revision", "agent", 1),
        ("agent~", "revision", "agent", 4),
        ("agent~0", "revision", "agent", 5),
        ("agent~4", "revision", "agent", 1),
        ("agent@good~1", "revision", "agent", 1),
        ("agent~1~2", "revision", "agent", 2),
        ("a~b", "session", "a~b", 2),
        ("a~b~1", "revision", "a~b", 1),
        ("empty", "session", "empty", None),
        ("age#of", "session", "age#of", 1),
        ("revision:agent@3", "revision", "agent", 3),
        ("session:agent@3", "session", "agent@3", 1),
        ("em", "session", "empty", None),
    ],
)
def test_a_session_or_revision_has_many_names(
    store: Store, text: str, kind: str, session: str, revision: int | None
) -> None:
    found = resolve(store, text)
    assert (found.kind, found.session, found.revision) == (kind, session, revision)
    if revision is not None:
        assert found.digest == store.session(session).entry(revision).manifest
    assert resolve(store, found.text)[2:] == found[2:]


@pytest.mark.parametrize(
    ("text", "session", "node", "revision"),
    [
        ("agent#n3", "agent", "n3", 5),
        ("agent@good#n1", "agent", "n1", 2),
        ("age#of#n0", "age#of", "n0", 1),
    ],
)
def test_a_node_is_named_through_its_session(
    store: Store, text: str, session: str, node: str, revision: int
) -> None:
    found = resolve(store, text)
    assert (found.session, found.node, found.revision) == (session, node, revision)
    node_found = store.session(session).node(node, at=revision)
    assert node_found is not None
    assert found.digest == node_found.digest
    assert resolve(store, found.text) == found


def test_objects_are_named_by_tags_digests_and_their_beginnings(store: Store) -> None:
    digest = store.put_blob(b"only once")
    hexed = digest.hex()
    for text in (hexed, hexed.upper(), hexed[:12], f"digest:{hexed[:8]}"):
        assert resolve(store, text).digest == digest
    assert resolve(store, "rel").digest == store.session("agent").entry(1).manifest


def test_an_exact_name_takes_precedence_over_a_prefix() -> None:
    with Store(MemoryEngine()) as small:
        begin = small.put_blob(b"something").hex()[:6]
        assert resolve(small, begin).kind == "digest"
        small.create_session(begin)
        assert resolve(small, begin).session == begin


@pytest.mark.parametrize("text", ["agent@3", "age"])
def test_an_ambiguous_name_is_refused_with_its_candidates(store: Store, text: str) -> None:
    with pytest.raises(AmbiguousNameError) as caught:
        resolve(store, text)
    candidates = caught.value.candidates
    assert len(candidates) > 1
    for candidate in candidates:
        assert resolve(store, candidate).text == candidate


def test_an_ambiguous_beginning_of_a_digest_lists_whole_ones(store: Store) -> None:
    with Store(MemoryEngine()) as many:
        found: dict[str, list[str]] = {}
        for number in range(2000):
            digest = many.put_blob(number.to_bytes(4, "big"))
            found.setdefault(digest.hex()[:4], []).append(digest.hex())
        begin, both = next((begin, both) for begin, both in found.items() if len(both) == 2)
        with pytest.raises(AmbiguousNameError) as caught:
            resolve(many, begin)
        assert sorted(caught.value.candidates) == sorted(f"digest:{one}" for one in both)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("nowhere", "nothing is called 'nowhere'", "casstore sessions"),
        ("agent@99", "has no revision or label '99'", "casstore history agent"),
        ("agent~9", "has no revision or label '~9'", "casstore history agent"),
        ("agent#n99", "has no node 'n99'", "casstore log agent"),
        ("agent@2#n4", "has no node 'n4'", "casstore log agent"),
        ("abc", "nothing is called", "at least 4 digits"),
    ],
)
def test_errors_name_the_missing_thing_and_where_to_look(
    store: Store, text: str, message: str, remedy: str
) -> None:
    with pytest.raises(NameNotFoundError) as caught:
        resolve(store, text)
    assert message in str(caught.value)
    assert remedy in caught.value.remedy


def test_the_error_for_a_deleted_session_says_that_it_was_deleted() -> None:
    with Store(MemoryEngine()) as store:
        store.create_session("gone")
        store.delete_session("gone")
        with pytest.raises(SessionDeletedError):
            resolve(store, "gone")


def test_commands_that_change_something_accept_only_full_names(store: Store) -> None:
    assert resolve(store, "agent@2", abbreviated=False).revision == 2
    with pytest.raises(NameNotFoundError):
        resolve(store, "em", abbreviated=False)


def test_split_store_splits_a_path_only_if_it_exists(tmp_path: Path) -> None:
    assert split_store(f"{tmp_path}::agent@3") == (str(tmp_path), "agent@3")
    assert split_store("nowhere::agent") == (None, "nowhere::agent")
    assert split_store("plain") == (None, "plain")


@settings(max_examples=150, deadline=None)
@given(st.text("agent@~#:0123abf\x1b\0 ", max_size=14))
def test_any_text_is_resolved_or_refused_by_a_typed_error(store: Store, text: str) -> None:
    try:
        found = resolve(store, text)
    except (InvalidInputError, NotFoundError):
        return
    assert resolve(store, found.text).digest == found.digest


def test_ambiguity_is_an_error_with_its_candidates(example: str) -> None:
    ran = run("show", "--json", "e", store=example, ends=3)
    assert ran.error["error"] == "AmbiguousNameError"
    assert "session:empty" in ran.error["try"]
    ran = run("show", "e", store=example, ends=3)
    assert "could mean 2 things" in ran.err
    assert "session:empty" in ran.err


def test_a_hostile_name_can_be_used_but_is_never_printed_raw(example: str) -> None:
    for arguments in (("sessions",), ("show", HOSTILE), ("log", HOSTILE), ("history", "evil"),
                      ("log", "--graph", "--all"), ("sessions", "--json"), ("show", HOSTILE + "@9"),
                      ("diff", HOSTILE, "agent"), ("cat", HOSTILE)):  # fmt: skip
        ran = run(*arguments, store=example, ends=None)
        written = ran.out + ran.err
        for char in ("\x1b", "\x07", "\u202e"):
            assert char not in written or arguments[-1] == "--json"
    assert "evil\\x1b[31m\\nname\\u202e" in run("sessions", store=example).out


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_an_engine_lists_digests_in_order_and_within_bounds(kind: str, tmp_path: Path) -> None:
    with Store(MemoryEngine()) if kind == "memory" else casstore.open(tmp_path) as store:
        digests = sorted(store.put_many([bytes([number]) for number in range(50)]))
        engine = store.engine
        assert isinstance(engine, Listing)
        assert engine.digests(bytes(32), b"\xff" * 32, limit=100) == digests
        assert engine.digests(digests[3], digests[7], limit=100) == digests[3:8]
        assert engine.digests(digests[3], digests[7], limit=2) == digests[3:5]
        after = bytes(31) + b"\1"
        assert engine.digests(bytes(32), after, limit=5) == []
        with pytest.raises(InvalidInputError):
            engine.digests(b"short", b"\xff" * 32, limit=1)


def test_nodes_digests_returns_the_digest_of_each_node(own: str) -> None:
    with casstore.open(own) as opened:
        session = opened.session("agent")
        for scope in ("path", "full"):
            nodes = session.nodes("path" if scope == "path" else "full")
            assert list(nodes.digests()) == [node.digest for node in nodes]
            assert list(nodes[2:5].digests()) == [node.digest for node in nodes[2:5]]
        session.tombstone(["n2"])
        assert list(session.nodes().digests()) == [node.digest for node in session.nodes()]


def test_every_name_listed_by_an_error_is_unambiguous(tmp_path: Path) -> None:
    """Ids may begin like what tells a session from others, and like options."""
    place = str(tmp_path / "store")
    ids = ["x", "session:x", ":x", "session::x", "tag:x", "revision:x@1", "-x", "a b"]
    with casstore.open(place) as store:
        for session in ids:
            one = store.session(session)
            one.commit(Commit(append=[NodeDraft("n", session)]))
        store.tag("x", store.put_blob(b"x"))
        for session in ids:
            assert resolve(store, f"session:{session}").session == session
    assert "session:x  tag:x" in run("show", "x", store=place, ends=3).err
    # Each is drawn; none is passed over, and none stops it.
    assert sorted(run("log", "--all", "--json", store=place).json["sessions"]) == sorted(ids)
    assert "history 'a b'" in run("show", "a b@9", store=place, ends=4).err
    assert "history -- -x" in run("show", "--", "-x@9", store=place, ends=4).err


@pytest.mark.parametrize(
    "text", ["agent" + "~" * 4000, "agent" + "~1#@" * 4000, "\udcff", "~", "#"]
)
def test_a_name_of_many_marks_or_of_no_text_is_refused(example: str, text: str) -> None:
    assert run("show", text, store=example, ends=None).code in (3, 4)


@pytest.mark.parametrize("path", ['plan["\\q"]', f"plan[{'9' * 5000}]", 'plan["', "plan[-1]"])
def test_an_invalid_path_is_refused(example: str, path: str) -> None:
    assert "is not a path" in run("cat", "note", "--path", path, store=example, ends=3).err


def test_an_empty_store_name_is_refused(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example)
    for arguments in (("--store", "", "sessions"), ("sessions", "--store", ""), ("init", "")):
        assert "the store's name is empty" in run(*arguments, ends=2).err


def test_an_empty_name_is_refused_though_there_is_only_one_session(tmp_path: Path) -> None:
    """It is the beginning of every id; a variable that was not set exported what there was."""
    place = str(tmp_path / "store")
    with casstore.open(place) as store:
        store.session("only").commit(Commit(append=[NodeDraft("n", 1)]))
    for arguments in (("show", ""), ("cat", ""), ("export", "", "x"), ("fork", "", "x")):
        assert "the name is empty" in run(*arguments, store=place, ends=3).err
    told = run("diff", f"{place}::", "only", store=place, ends=3).err
    assert "names only a store; add a name in it" in told
    assert run("sessions", "--json", store=place).json["sessions"][0]["id"] == "only"


def test_a_tag_or_pin_on_a_checkpoint_is_a_place_everywhere(own: str, tmp_path: Path) -> None:
    for place in ("release", "release~0", "resume~"):
        run("log", place, store=own)
    assert run("show", "release~2", "--json", store=own).json["revision"]["revision"] == 3
    assert run("show", "release#n2", "--json", store=own).json["node"]["id"] == "n2"
    assert "has no node 'n9'" in run("show", "release#n9", store=own, ends=4).err
    assert "has no revision or label '~9'" in run("show", "release~9", store=own, ends=4).err
    bundle = str(tmp_path / "release.bundle")
    assert run("export", "release", bundle, "--json", store=own).json["session"] == "agent"
    fork = run("fork", "resume", "resumed", "--json", store=own).json
    assert (fork["source"], fork["source_revision"]) == ("agent", 3)


def test_a_misspelt_label_gets_a_suggestion(example: str) -> None:
    assert "did you mean agent@middle?" in run("log", "agent@midle", store=example, ends=4).err
