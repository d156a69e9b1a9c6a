"""What rollouts hold, as SQL shows it: text, messages, tools, versions, rewards."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from tokenizers import Tokenizer

from gyre.store import queries
from gyre.store.db import transaction
from gyre.store.handout import hand_out
from gyre.store.models import Call, Node
from gyre.store.tokens import pack_ids
from gyre.store.vocabulary import load_vocabulary, token_pieces
from tests.store.world import RUN, add_call, make_world, settle

POLICY = Path(__file__).parents[2] / "examples" / "quickstart" / "policy"
one_database = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@one_database
@given(data=st.binary(max_size=40))
@example("größe 世界 🚀 e\u0301".encode())
@example(
    b"\xf0\x9f\x9a a \xe2\x82 \xc0\xaf \xed\xa0\x80 \xf5 \xf0\x80\x80\x80 \xf4\x90\x80\x80 \xe2\x28\xa1 \xff\n\xfe"
)
def test_bytes_are_read_as_python_reads_them(engine: Engine, data: bytes) -> None:
    data = data.replace(b"\0", b"")
    with engine.connect() as c:
        assert c.scalar(text("SELECT gyre_utf8(:b)"), {"b": data}) == data.decode(errors="replace")


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(POLICY / "tokenizer.json"))


@pytest.fixture
def vocabulary(engine: Engine) -> str:
    with transaction(engine) as s:
        make_world(s)
        name = load_vocabulary(s, RUN, POLICY)
        assert name is not None
        assert load_vocabulary(s, RUN, POLICY) == name
        return name


@one_database
@given(ids=st.lists(st.integers(0, 1300), max_size=60))
def test_ids_are_read_as_the_tokenizer_reads_them(
    engine: Engine, vocabulary: str, tokenizer: Tokenizer, ids: list[int]
) -> None:
    said = tokenizer.decode(ids, skip_special_tokens=False).replace("\0", "\u2400")
    with engine.connect() as c:
        assert c.scalar(text("SELECT gyre_text(:b, :v)"), {"b": pack_ids(ids), "v": vocabulary}) == said


def test_text_of_nodes_and_paths(engine: Engine, vocabulary: str, tokenizer: Tokenizer) -> None:
    with transaction(engine) as s:
        rollout = s.scalars(text("SELECT id FROM rollouts ORDER BY id")).first()
        assert rollout is not None
        whole = tokenizer.encode("say größe 🚀 then stop").ids
        leaf = add_call(s, rollout, prompt=len(whole) - 4, generated=4)
        prompt = s.get_one(Node, leaf.parent_id)
        prompt.token_ids, leaf.token_ids = pack_ids(whole[:-4]), pack_ids(whole[-4:])
        s.flush()
        assert s.scalar(text("SELECT path_text(:n)"), {"n": leaf.id}) == "say größe 🚀 then stop"
        parts = [s.scalar(text("SELECT node_text(:n)"), {"n": n}) for n in (prompt.id, leaf.id)]
        assert parts == [tokenizer.decode(whole[:-4]), tokenizer.decode(whole[-4:])]


def test_text_needs_a_vocabulary(engine: Engine, tmp_path: Path) -> None:
    with transaction(engine) as s:
        leaf = add_call(s, make_world(s).rollouts[0][0])
        assert load_vocabulary(s, RUN, tmp_path) is None
        (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "WordPiece"}, "model": {"vocab": {}}}))
        assert load_vocabulary(s, RUN, tmp_path) is None
        assert s.scalar(text("SELECT node_text(:n)"), {"n": leaf.id}) is None
        assert s.scalar(text("SELECT path_text(:n)"), {"n": leaf.id}) is None


def test_the_pieces_of_a_tokenizer_with_byte_fallback() -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    vocabulary = [["<unk>", 0], ["<0xE2>", 0], ["<0x00>", 0], ["\u2581the", 0], ["größe", 0]]
    model: dict[str, Any] = {"vocab": vocabulary}
    added = [{"id": 5, "content": "</s>"}]
    pieces = token_pieces({"decoder": decoder, "model": model, "added_tokens": added})
    assert pieces == {0: b"<unk>", 1: b"\xe2", 2: "\u2400".encode(), 3: b" the", 4: "größe".encode(), 5: b"</s>"}


def test_versions_owned_tokens_tools_messages_and_rewards(engine: Engine) -> None:
    with transaction(engine) as s:
        world = make_world(s, size=2)
        a, b = world.rollouts[0]
        first = add_call(s, a, prompt=5, generated=4, versions=[[2, 0, 1], [3, 1, 4]])
        second = add_call(s, a, first, prompt=2, generated=3)
        add_call(s, b)
        calls = s.query(Call).filter(Call.rollout_id == a).order_by(Call.seq).all()
        calls[0].request = {
            "base": 0,
            "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}],
        }
        made = {"id": "t1", "name": "Bash", "arguments": '{"command": "ls"}'}
        calls[0].response = {"content": "on it", "reasoning": None, "tool_calls": [made, made | {"name": "Read"}]}
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        result = {"type": "tool_result", "tool_use_id": "t1", "content": parts}
        messages = [
            {"role": "tool", "content": parts},
            {"role": "user", "content": [result, result | {"content": "c"}]},
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {"type": "function_call_output", "call_id": "t1", "output": "out"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "dev"}]},
            {"instructions": "do"},
            {"items": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "did"}]}]},
        ]
        calls[1].request = {"base": 3, "messages": messages}
        queries.record_score(
            s,
            a,
            1,
            "ok",
            0.5,
            {"rewards": {"reward": 0.5, "speed": 2, "note": "x"}},
            started_at=dt.datetime.now(dt.UTC),
        )
        settle(s, a, 0.5)
        settle(s, b, 0.0)
        hand_out(s, world.group_ids[0], branch_cap=5, micro_batch_tokens=64, normalize_std=True)

        def rows(query: str) -> list[tuple[Any, ...]]:
            return [tuple(r) for r in s.execute(text(query), {"a": a})]

        assert rows("SELECT version, start, length FROM version_span WHERE rollout_id = :a ORDER BY start") == [
            (2, 5, 1), (3, 6, 3), (0, 11, 3),
        ]  # fmt: skip
        assert rows("SELECT leaf_id, node_id, start, length FROM owned_span WHERE rollout_id = :a ORDER BY start") == [
            (second.id, first.id, 5, 4), (second.id, second.id, 11, 3),
        ]  # fmt: skip
        owned = "SELECT sum(length) FROM owned_span WHERE rollout_id = :a"
        assert rows(owned) == rows("SELECT sum(n_targets) FROM branch WHERE rollout_id = :a")
        assert rows("SELECT seq, position, name, arguments FROM tool_call WHERE rollout_id = :a ORDER BY 1, 2") == [
            (0, 0, "Bash", '{"command": "ls"}'), (0, 1, "Read", '{"command": "ls"}'),
        ]  # fmt: skip
        assert rows("SELECT position, role, text FROM message WHERE rollout_id = :a ORDER BY seq, position") == [
            (0, "system", "be"), (1, "user", "go"), (2, "answer", "on it"), (3, "tool", "a\nb"),
            (4, "tool", "a\nb\nc"), (5, "system", "be brief"), (6, "tool", "out"), (7, "developer", "dev"),
            (8, "system", "do"), (9, "assistant", "did"),
        ]  # fmt: skip
        assert rows("SELECT attempt, reward, key, value FROM reward WHERE rollout_id = :a ORDER BY key") == [
            (1, 0.5, "reward", 0.5), (1, 0.5, "speed", 2.0),
        ]  # fmt: skip
