"""A store that shows everything the viewer can show: made up, and the same each time.

Used by the viewer's tests and by ``screenshots.py``. Times are fixed, so pictures stay the same.
"""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

from casstore import Checkpoint, Commit, NodeDraft, Usage
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.session.data import Attachment
from casstore.store import Store

#: The time of the first commit: 2026-03-02 09:00 UTC.
START_MS = 1_772_442_000_000
MINUTE_MS = 60_000
DAY_MS = 86_400_000
#: Of a long session.
TURNS_A_COMMIT = 50


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, time_ms: int) -> None:
        """Move it."""
        self.now_ms += time_ms


HOSTILE_ID = 'evil"><script>document.title="owned"</script>\u202e/../..&#x3c;'
HOSTILE_TEXT = (
    '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    '</pre></div></main>"\'><svg onload=document.title="owned"> \u202etxt.exe\u202c \x07\x1b[31m '
    "{{ 7*7 }} ${7*7} javascript:document.title='owned'"
)

README_BEFORE = """# parser

Reads configuration files.

## Usage

    parse(text)

Returns a dict.
"""
README_AFTER = """# parser

Reads configuration files, and says where they are wrong.

## Usage

    parse(text, strict=True)

Returns a dict. Raises ParseError with the line.
"""

QUESTIONS = (
    "The parser accepts a key that is given twice. Find out why, and make it an error.",
    "Good. The error should say on which line the key was given first.",
    "Does this change the result for files that were fine before?",
    "Please update the README, and keep it short.",
    "Run the whole test suite once more before we finish.",
)
ANSWERS = (
    "A dict keeps the last value of a key, so the first one is overwritten silently. I will "
    "remember the keys while parsing, and raise `ParseError` for the second one.",
    "The parser now keeps the line number of each key. The message reads:\n\n"
    "    line 7: 'port' was given on line 3 already\n\n"
    "Both lines are named, so nobody has to search.",
    "No. I ran the parser of the last release and the new one over the 214 files in `examples/`: "
    "213 give equal results, and one gives the new error. That file has `timeout` twice.",
    "Done: two sentences, and one example with `strict=True`.",
    "All 320 tests pass. Nothing else has changed.",
)

CODE = """def parse(text):
    found = {}
    for line in lines(text):
        key, value = split(line)
        found[key] = value
    return found
"""


def png(width: int = 96, height: int = 48) -> bytes:
    """A small picture: a gradient."""
    rows = b"".join(
        b"\0" + b"".join(bytes((40 + 2 * x, 90 + y, 200 - x)) for x in range(width))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def user(node: str, text: str, **more: Any) -> NodeDraft:
    """A message of the user."""
    return NodeDraft(node, {"role": "user", "content": text}, **more)


def assistant(node: str, *parts: Any, **more: Any) -> NodeDraft:
    """A message of the model."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return NodeDraft(node, {"role": "assistant", "content": content}, **more)


def call(number: str, name: str, **given: Any) -> dict[str, Any]:
    """A tool call, as a part of a message."""
    return {"type": "tool_use", "id": number, "name": name, "input": given}


def result(node: str, number: str, text: str, *, is_error: bool = False) -> NodeDraft:
    """The result of a tool call."""
    part = {"type": "tool_result", "tool_use_id": number, "content": text, "is_error": is_error}
    return NodeDraft(node, {"role": "user", "content": [part]})


def open_store(path: Path, clock: Clock) -> Store:
    """Open a store whose times are those of a clock."""
    return Store(LmdbEngine(str(path), durability="relaxed", clock=clock))


def build(path: Path, *, sessions: int = 50, hostile: bool = True) -> None:
    """Fill a store at ``path``: sessions, forks of forks, record systems, hostile content."""
    clock = Clock()
    with open_store(path, clock) as store:
        _parser(store, clock)
        _forks(store, clock)
        if hostile:
            _hostile(store)
        _hidden(store)
        _compacted(store)
        _others(store, clock, sessions)
        _langgraph(store)
        _claude(store)
        store.tag("release-1.4", store.session("fix-parser").entry(6).manifest, note="shipped")
        store.tag("notes", store.put_value({"plan": ["read", "edit"], "bytes": b"\0\1", "n": 1.5}))
        store.tag("picture", store.put_blob(png()))
        store.tag("log", store.put_blob(b"started\nlistening on :8080\nstopped\n" * 40))


def _state(turn: int) -> Checkpoint:
    files = {
        "README.md": README_BEFORE if turn < 4 else README_AFTER,
        "src/parser.py": f"# version {turn}\n" + "def parse(text):\n    ...\n" * (2 + turn),
        "tests/test_parser.py": "def test_keys():\n    ...\n" * (1 + turn),
    }
    plan = ["read the parser", "find the cause", "write a test", "fix it", "update the README"]
    return Checkpoint(
        turn_state={"turn": turn, "phase": "working" if turn < 5 else "done"},
        tool_state={
            "cwd": "/home/ada/parser",
            "files": files,
            "plan": [{"step": step, "done": at < turn} for at, step in enumerate(plan)],
            "tests": {"passed": 310 + 2 * turn, "failed": max(0, 3 - turn)},
        },
        config={"model": "large-2", "temperature": 0.2, "tools": ["read", "edit", "run"]},
    )


def _parser(store: Store, clock: Clock) -> None:
    """An agent at work: five turns with tools, a rewind, labels, a queue and a lease."""
    store.create_session(
        "fix-parser", name="Duplicate keys in the parser", model="large-2",
        cwd="/home/ada/parser", subjects=["ada"],
    )  # fmt: skip
    agent = store.session("fix-parser")
    for turn, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True), 1):
        clock.advance(7 * MINUTE_MS)
        time = f"2026-03-02T09:{7 * turn:02d}:00Z"
        ask = user(f"u{turn}", question, time=time)
        read, run = f"call_{turn}a", f"call_{turn}b"
        work = [
            assistant(
                f"a{turn}.1", {"type": "thinking", "thinking": "Look at the loop that reads keys."},
                "I will look at the code first.", call(read, "read", path="src/parser.py"),
            ),
            result(f"r{turn}.1", read, CODE),
            assistant(f"a{turn}.2", call(run, "run", command="pytest -q tests/test_parser.py")),
            result(f"r{turn}.2", run, f"{'F' if turn < 3 else '.'}...... {6 + turn} tests in 0.4s",
                   is_error=turn < 3),
            assistant(f"a{turn}.3", answer),
        ]  # fmt: skip
        agent.commit(Commit(append=[ask], turn=f"turn-{turn}-ask"))
        clock.advance(MINUTE_MS)
        agent.commit(
            Commit(
                append=work, checkpoint=_state(turn), turn=f"turn-{turn}",
                usage=[Usage("agent", "large-2", input=1800 * turn, output=240 + 30 * turn)],
                label={1: "cause-found", 3: "green"}.get(turn),
            )
        )  # fmt: skip
    agent.commit(Commit(append=[user("try", "Try a faster tokenizer.")]))
    tried = assistant("try.1", "It is 3 times as fast, but loses the columns.")
    agent.commit(Commit(append=[tried]))
    clock.advance(5 * MINUTE_MS)
    agent.rewind(10, label="without-tokenizer")
    clock.advance(MINUTE_MS)
    agent.commit(
        Commit(append=[user("u6", "Leave the tokenizer. Look at the profile instead.")])
    )  # fmt: skip
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": base64.b64encode(png()).decode()}}  # fmt: skip
    agent.commit(
        Commit(append=[NodeDraft("u6.i", {"role": "user", "content": ["The profile:", image]})])
    )  # fmt: skip
    used = [Usage("agent", "small-1", input=400, output=60)]
    said = assistant("a6", "Most of the time goes into splitting lines.")
    agent.commit(Commit(append=[said], usage=used))
    # A branch inside the graph that the active path does not take.
    agent.commit(Commit(append=[assistant("alt.1", "Another way: a table of states.", parent="u5")],
                        leaf="a6"))  # fmt: skip
    agent.queue.enqueue([{"task": "write the release notes"}], batch_id="notes")
    agent.queue.enqueue([{"task": "ask for a review"}], batch_id="review")
    found: Attachment = agent.attachments.put(png(), owner="ada")
    agent.attachments.intend("trace-1", uri="s3://traces/1", owner="ada")
    agent.attachments.commit([found.id])
    lease = agent.claim_lease("worker-7", ttl_ms=10 * 365 * DAY_MS)
    assert lease is not None
    agent.queue.claim(lease)


def _forks(store: Store, clock: Clock) -> None:
    """Forks, forks of forks, and one that was adopted."""
    for number, (name, at) in enumerate((("strict-mode", 4), ("warn-only", 6), ("rewrite", 8))):
        clock.advance(DAY_MS)
        store.fork("fix-parser", name, at=at)
        fork = store.session(name)
        for step in range(2 + 2 * number):
            fork.commit(
                Commit(
                    append=[user(f"f{step}", f"{name}: step {step}?"),
                            assistant(f"g{step}", f"{name}: done with step {step}.")],
                    checkpoint=_state(2 + step),
                    usage=[Usage("agent", "large-2", input=900, output=100)],
                )
            )  # fmt: skip
    store.fork("strict-mode", "strict-by-default")
    deeper = store.session("strict-by-default")
    deeper.commit(Commit(append=[user("d1", "And if it were the default?")]))
    store.fork("strict-by-default", "strict-with-switch")
    store.session("strict-with-switch").commit(
        Commit(append=[assistant("e1", "A switch turns it off.")])
    )
    store.session("strict-by-default").adopt("strict-with-switch", label="decided")


def _hostile(store: Store) -> None:
    evil = store.session(HOSTILE_ID)
    evil.commit(
        Commit(
            append=[
                user("h1\"'><script>", HOSTILE_TEXT),
                assistant("h2", HOSTILE_TEXT, call("</script>", HOSTILE_TEXT, code=HOSTILE_TEXT)),
                NodeDraft("h3", {HOSTILE_TEXT: HOSTILE_TEXT}),
                NodeDraft("h4", {"role": HOSTILE_TEXT, "content": "<b>x" * 262_144}),
            ],
            checkpoint=Checkpoint(tool_state={HOSTILE_TEXT: [HOSTILE_TEXT, "y" * 100_000]}),
            label="<b>label</b>",
            turn="<i>turn</i>",
        )
    )  # fmt: skip


def _hidden(store: Store) -> None:
    session = store.session("with-hidden")
    session.commit(
        Commit(append=[user("open", "This may be read."), user("secret", "SECRET-HIDDEN-TEXT"),
                       assistant("after", "What follows stays.")])
    )  # fmt: skip
    session.tombstone(["secret"])


def _compacted(store: Store) -> None:
    """A session whose beginning was replaced by a summary; its messages name usage and cost."""
    used = {"input_tokens": 5200, "output_tokens": 310}
    summary = {"role": "user", "isCompactSummary": True, "content": "So far: the parser is fixed."}
    answer = {"role": "assistant", "content": "Then I go on.", "usage": used, "cost_usd": 0.0187}
    store.session("compacted").commit(
        Commit(append=[NodeDraft("c1", summary), NodeDraft("c2", answer)])
    )


def _others(store: Store, clock: Clock, sessions: int) -> None:
    """As many sessions more as are wanted, on several days."""
    known = sum(1 for _ in store.sessions())
    areas = ("billing", "search", "docs", "api", "ios")
    for number in range(max(0, sessions - known)):
        clock.advance(DAY_MS // 3)
        area = areas[number % len(areas)]
        store.create_session(f"{area}-{number:02d}", name=f"{area.title()} task {number}")
        session = store.session(f"{area}-{number:02d}")
        for step in range(1 + number % 4):
            session.commit(
                Commit(
                    append=[user(f"n{step}", f"{area}: question {step} of task {number}"),
                            assistant(f"m{step}", "An answer. " * (10 + 20 * (number % 7)))],
                    checkpoint=Checkpoint(tool_state={"log": "line\n" * 40 * (number % 5)}),
                )
            )  # fmt: skip
    store.create_session("empty", name="Nothing yet")


def build_long(path: Path, turns: int) -> None:
    """Create a store with one session of ``turns`` turns; the last hundred have a commit each."""
    with open_store(path, Clock()) as store:
        session = store.session("long")
        nodes: list[NodeDraft] = []
        for turn in range(turns):
            nodes += [user(f"u{turn}", f"question {turn} " * 8), assistant(f"a{turn}", "yes " * 60)]
            if turn % TURNS_A_COMMIT == TURNS_A_COMMIT - 1 or turn >= turns - 100:
                state = Checkpoint(turn_state={"turn": turn})
                session.commit(Commit(append=nodes, checkpoint=state))
                nodes = []


def _langgraph(store: Store) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langgraph.checkpoint.base import empty_checkpoint

    from casstore.adapters.langgraph import CasstoreSaver

    saver = CasstoreSaver(store)
    config: Any = {"configurable": {"thread_id": "trip-to-rome", "checkpoint_ns": ""}}
    messages: list[Any] = []
    script = [
        HumanMessage("Plan a weekend in Rome."),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "w1"}]),
        ToolMessage("Sunny, 24 degrees.", tool_call_id="w1"),
        AIMessage("Saturday: the Forum. Sunday: Trastevere."),
    ]
    versions: dict[str, Any] = {}
    for step, message in enumerate(script):
        messages = [*messages, message]
        checkpoint: Any = empty_checkpoint()
        checkpoint["id"] = f"1f0a{step:04d}-0000-6000-8000-000000000000"
        checkpoint["ts"] = f"2026-03-05T10:0{step}:00+00:00"
        checkpoint["channel_values"] = {"messages": messages, "city": "Rome"}
        new: dict[str, Any] = {"messages": saver.get_next_version(versions.get("messages"), None)}
        if not step:
            new["city"] = saver.get_next_version(None, None)
        versions = {**versions, **new}
        checkpoint["channel_versions"] = dict(versions)
        source = "input" if not step else "loop"
        metadata: Any = {"step": step - 1, "source": source}
        config = saver.put(config, checkpoint, metadata, new)
    saver.put_writes(config, [("messages", AIMessage("One more idea."))], "task-1")


def _claude(store: Store) -> None:
    from casstore.adapters.claude.transcripts import TranscriptKey, Transcripts

    entries: list[Any] = []
    parent = None
    texts = ("Why is the build slow?", "The cache key contains the time.", "Fix it.", "Done.")
    for at, text in enumerate(texts):
        role = ("user", "assistant")[at % 2]
        uuid = f"00000000-0000-4000-8000-{at:012d}"
        content: Any = text if role == "user" else [{"type": "text", "text": text}]
        entries.append(
            {
                "parentUuid": parent, "isSidechain": False, "cwd": "/home/ada/app",
                "sessionId": "5e55a0b1-0000-4000-8000-000000000001", "version": "2.1.0",
                "gitBranch": "main", "type": role, "uuid": uuid,
                "message": {"role": role, "content": content},
                "timestamp": f"2026-03-06T08:00:{at:02d}.000Z",
            }
        )  # fmt: skip
        parent = uuid
    Transcripts(store).append(TranscriptKey("app", "5e55a0b1-0000-4000-8000-000000000001"), entries)
