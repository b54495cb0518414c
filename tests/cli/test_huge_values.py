"""Values of any size are printed, and none of them is built to do so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from casstore import Checkpoint, Commit, Digest, NodeDraft, Store
from casstore.cli.configuration import Steps
from casstore.cli.maintain import maintain_store, write_report
from casstore.cli.places import open_object
from casstore.cli.text import brief, json_line, json_pieces, plain, summary
from casstore.engine.memory import MemoryEngine
from casstore.errors import ExpansionError
from casstore.format import canonical
from casstore.format.canonical import ROLE_PART, link_bytes
from casstore.format.graph import Manifest, encode_components
from casstore.format.graph import linked as link_to
from casstore.format.splitting import Encoded
from casstore.maintenance import erasure, retention
from casstore.maintenance.import_ import import_session
from casstore.maintenance.verify import BundleLimits
from casstore.objects import pieces, stored
from tests.cli.running import run
from tests.maintenance.test_bundle_file import Draft, shared_parts
from tests.objects.specimens import Values

# A command that only starts takes 25 MiB.
_FEW_KIB = 100 << 10
# The most memory that the process has had since it was started; of its parent nothing counts.
_MEASURED = """
import atexit, sys
def tell():
    with open("/proc/self/status") as status:
        print([line.split()[1] for line in status if line.startswith("VmHWM")][0], file=sys.stderr)
atexit.register(tell)
from casstore.cli.main import main
sys.argv[0] = "casstore"
sys.exit(main())
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a session whose payload and component a few shared parts blow up."""
    place = tmp_path_factory.mktemp("hostile")
    draft = Draft()
    part = shared_parts(draft, 30)
    linked = Encoded(link_bytes(ROLE_PART, part), [part])
    message = canonical.encode({"role": "user", "text": "what is said", "tree": None})
    payload = Encoded(message[:-1] + linked.data, [part])
    node = draft.node("n", None, users=1, payload=payload)
    other = draft.put(3, b"\x92\x01" + link_bytes(ROLE_PART, part))
    draft.revision(
        Manifest(
            leaf_id="n", nodes=1, next_seq=1, leaf=node,
            components=encode_components({
                "tool_state": link_to(part), "plugin_snapshot": link_to(other),
                "turn_state": linked, "config": linked,
            }),
        )
    )  # fmt: skip
    bundle = draft.write(place / "bundle")
    with casstore.open(place / "store") as store:
        import_session(store, bundle, limits=BundleLimits(max_repeated_bytes=1 << 60))
        store.tag("value", Digest(part))
        store.tag("other", Digest(other))
    return str(place / "store")


SHORT_ANSWERS = {
    "show session": ["show", "s"],
    "show session --full": ["show", "s", "--full"],
    "show node": ["show", "s#n"],
    "show node --path": ["show", "s#n", "--path", "payload.tree[1]"],
    "show value": ["show", "tag:value"],
    "show value --json": ["show", "tag:value", "--json"],
    "log": ["log", "s"],
    "log --json": ["log", "s", "--json"],
    "sessions": ["sessions"],
    "diff": ["diff", "tag:value", "tag:other"],
    "diff --stat": ["diff", "tag:value", "tag:other", "--stat", "--json"],
    "check": ["check", "--level", "full"],
    "export": ["export", "s", "{}/again.bundle"],
}


@pytest.mark.parametrize("arguments", SHORT_ANSWERS.values(), ids=SHORT_ANSWERS)
def test_a_command_shows_the_beginning_of_a_value_that_expands_without_end(
    hostile: str, tmp_path: Path, arguments: list[str]
) -> None:
    command = [sys.executable, "-c", _MEASURED, "--store", hostile]
    command += [argument.format(tmp_path) for argument in arguments]
    ran = subprocess.run(command, capture_output=True, check=False, text=True)
    assert ran.returncode == 0, ran.stderr[-1000:]
    assert len(ran.stdout) < 1_000_000
    assert int(ran.stderr.splitlines()[-1]) < _FEW_KIB


LONG_ANSWERS = {
    "cat": ["cat", "tag:value"],
    "cat --json": ["cat", "s", "--json"],
    "cat --path": ["cat", "s", "--path", "turn_state[0][1]"],
    "show --path": ["show", "s#n", "--path", "payload.tree[1]", "--full"],
    "show node --full": ["show", "s#n", "--full"],
    "show node --json": ["show", "s#n", "--json"],
    "log --payloads": ["log", "s", "--payloads"],
    "diff --json": ["diff", "tag:value", "tag:other", "--json"],
    "diff --patch": ["diff", "tag:value", "tag:other", "--patch"],
}


@pytest.mark.parametrize("arguments", LONG_ANSWERS.values(), ids=LONG_ANSWERS)
def test_a_command_that_prints_all_of_a_value_ends_where_its_parts_repeat_too_often(
    hostile: str, arguments: list[str]
) -> None:
    ran = run(*arguments, store=hostile, ends=3)
    assert 10_000 < len(ran.out) < 10_000_000
    assert "repeat" in ran.err
    assert "--path" in ran.err


def test_cat_leaves_no_output_file_if_the_value_cannot_be_printed_completely(
    hostile: str, tmp_path: Path
) -> None:
    run("cat", "tag:value", "--output", str(tmp_path / "out"), store=hostile, ends=3)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_repeats_its_parts_as_often_as_it_may_is_printed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "REPEATED_BYTES", 1 << 14)
    store = Store(MemoryEngine())
    part = {"lines": [f"line {at} of a part" for at in range(40)]}
    value = [{"number": at, "part": part} for at in range(200)]
    digest = store.put_value(value)
    assert json.loads(json_line(open_object(store, digest))) == value
    monkeypatch.setattr(stored, "MAX_REPEATED_BYTES", 1 << 14)
    with pytest.raises(ExpansionError, match=r"16,384.*view"):
        json_line(open_object(store, digest))


def test_sessions_are_listed_though_one_has_a_first_message_that_cannot_be_read(
    hostile: str,
) -> None:
    with casstore.open(hostile, readonly=True) as store:
        session = store.session("s")
        with pytest.raises(ExpansionError):
            session.node("n")
        [info] = store.sessions()
        assert info.first_user_message == "what is said"
    assert "what is said" in run("sessions", store=hostile).out
    assert "user: what is said" in run("log", "s", store=hostile).out


# --- the same as of a value that is read whole ---------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_stored_value_is_printed_as_one_that_is_read_whole(seed: int) -> None:
    store = Store(MemoryEngine())
    digest = store.put_value(Values(seed).value(3))
    value, whole = store.get_value(digest), open_object(store, digest)
    for indent, ascii_only in ((2, True), (2, False), (None, True)):
        expected = json.dumps(plain(value), indent=indent, ensure_ascii=True)
        found = "".join(json_pieces(whole, ascii_only=ascii_only, indented=indent is not None))
        assert json.loads(found) == json.loads(expected)
        if ascii_only:
            assert found == expected
    for width in (20, 60, 200):
        assert brief(whole, width) == brief(value, width)
        assert summary(whole, width) == summary(value, width)


def test_long_texts_and_bytes_are_printed_in_parts() -> None:
    store = Store(MemoryEngine())
    value = {"text": "é\n\x1b" * 100_000, "bytes": bytes(range(256)) * 1_000, "$key": [b"", ""]}
    digest = store.put_value(value)
    found = list(json_pieces(open_object(store, digest)))
    assert json.loads("".join(found)) == plain(value)
    assert max(map(len, found)) < 1_000_000


def test_the_beginning_of_a_value_shows_the_keys_behind_a_long_entry() -> None:
    store = Store(MemoryEngine())
    message = {"content": "c" * 500_000, "role": "user", "z": list(range(100_000))}
    begun = open_object(store, store.put_value(message)).beginning(1_000)
    assert list(begun) == ["content", "role", "z"]
    assert begun["role"] == "user"
    assert 100 < len(begun["content"]) < 1_000
    assert begun["z"][:3] == [0, 1, 2]
    assert len(begun["z"]) < 1_000


def test_omitted_lines_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    with casstore.open(place) as store:
        store.session("s").commit(
            Commit(
                append=[
                    NodeDraft("few", list(range(60))), NodeDraft("many", list(range(50_000))),
                    NodeDraft("edge", list(range(38))), NodeDraft("over", list(range(39))),
                ],
            )
        )  # fmt: skip
    assert run("show", "s#few", store=place).out.endswith("… 22 more lines: --full\n")
    assert "… more than 10,000 more lines: --full" in run("show", "s#many", store=place).out
    assert "--full" not in run("show", "s#edge", store=place).out
    assert run("show", "s#over", store=place).out.endswith("… 1 more line: --full\n")
    assert json.loads(run("show", "s#many", "--full", "--path", "payload", store=place).out) == (
        list(range(50_000))
    )


# --- escapes -------------------------------------------------------------------------------------

UNSAFE = "a\x7fb\x80c\x9bd\u202ee\u2066f\u200bg\u2028h\ue000i"


def test_json_output_contains_no_terminal_control_characters(tmp_path: Path) -> None:
    assert json.loads(json_line({UNSAFE: [UNSAFE]})) == {UNSAFE: [UNSAFE]}
    place = str(tmp_path / "s")
    with casstore.open(place) as store:
        session = store.session(UNSAFE)
        state = Checkpoint(config={UNSAFE: UNSAFE * 100})
        session.commit(Commit(append=[NodeDraft(UNSAFE, UNSAFE)], checkpoint=state))
        session.commit(Commit(append=[NodeDraft("b", {UNSAFE: 1})], label=UNSAFE))
    for arguments in (
        ["sessions"], ["show", UNSAFE], ["log", UNSAFE, "-p"], ["cat", UNSAFE], ["stats"],
        ["diff", f"{UNSAFE}@1", UNSAFE], ["diff", f"{UNSAFE}@1", UNSAFE, "--patch"],
        ["history", UNSAFE], ["export", UNSAFE, str(tmp_path / "bundle")], ["show", "nothing"],
    ):  # fmt: skip
        ran = run(*arguments, "--json", store=place, ends=None)
        document = ran.out or ran.err
        json.loads(document)
        for char in UNSAFE:
            assert char.isalpha() or char not in document, (arguments, char)
    patch = run("diff", f"{UNSAFE}@1", UNSAFE, "--patch", store=place).out
    assert json.loads(patch)
    assert all(char.isalpha() or char not in patch for char in UNSAFE)


def test_plans_hold_no_character_that_a_terminal_acts_on(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        session = store.session(UNSAFE)
        for number in range(3):
            session.commit(Commit(append=[NodeDraft(f"n{number}", 1)]))
        store.create_session("about", subjects=[UNSAFE])
        pruning = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
        erasing = erasure.plan(store, UNSAFE)
        for line in (*pruning.to_json(), erasing.to_json()):
            assert line.isprintable()
            assert line.isascii()
        assert list(retention.Plan.from_json(pruning.to_json())) == list(pruning)
        assert erasure.ErasurePlan.from_json(erasing.to_json()) == erasing


def test_the_report_of_an_offline_run_contains_no_terminal_control_characters(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    found = maintain_store(str(tmp_path / UNSAFE.replace("/", "")), Steps(), dry_run=True)
    write_report(str(report), {"interrupted": False, "stores": [found.report]})
    [told] = json.loads(report.read_text())["stores"]
    assert told["path"] == found.path
    assert told["error"]["error"] == "StoreNotFoundError"
    assert report.read_text().replace("\n", "").isprintable()
    assert report.read_text().isascii()
