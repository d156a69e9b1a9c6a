"""What must hold of a real harness's run, call by call; and the figures of its table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import select
from tokenizers import Tokenizer

from gyre.store.db import transaction
from gyre.store.models import Call, Node
from tests.gateway.harness_runs import seen_anthropic, seen_openai  # noqa: F401 - they add their readers
from tests.gateway.harness_runs.recorder import Exchange
from tests.gateway.harness_runs.run_harness import HarnessRun
from tests.gateway.harness_runs.seen import READERS, Item, Reply, Seen, decoded
from tests.scripted.proof import prove


@dataclass
class Facts:
    """Figures of one run. Tokens are of complete calls; `sent` is what they would be if each were stored by itself."""

    calls: int
    other: dict[str, int]
    """Calls that are not complete, by status."""
    forks: dict[str, int]
    branches: dict[str, int]
    turns: int
    """Complete calls of the kind main."""
    stored: int
    sent: int

    @property
    def unexpected(self) -> set[str]:
        """Reasons of forks, but for the roots that every run has."""
        return set(self.forks) - {"root"}


def check(run: HarnessRun) -> Facts:
    """Prove of every call of the run that

    - the stored prompt and output ids are those that the engine got and gave (tests/scripted/proof.py),
    - an extension's prompt begins with all the ids of the call that it extends, sampled ones included,
    - its decoded prompt is, message by message, what the harness sent, and each assistant turn in it is an answer as
      the harness got it (or as it sent it, where no such answer was given: a history that it made up),
    - its decoded output is what the harness got, and the usage that the harness was told is true,

    and that every answer that the harness got whole is a complete call. Raises AssertionError.
    """
    world, tokenizer = run.world, Tokenizer.from_file(str(run.world.run.policy.path / "tokenizer.json"))
    calls = world.calls(run.member)
    complete = [c for c in calls if c.status == "complete"]
    assert prove(world, run.engines, [run.member]) == len(complete)
    answered = [e for e in run.exchanges if e.status == 200 and _reader(e) is not None]
    found: set[int] = set()
    paths = {c.id: world.path(c.leaf_id) for c in complete}
    said: list[Item] = []
    begin = tokenizer.token_to_id("<|im_start|>")
    for call in complete:
        ids = paths[call.id]
        if call.fork_reason is None and call.parent_call_id is not None:
            before = paths[call.parent_call_id]
            assert ids[: len(before)] == before, f"call {call.seq} does not go on from call {call.parent_call_id}"
        prompt = decoded(ids[: call.prompt_tokens], tokenizer)
        output = decoded(ids[_last(ids[: call.prompt_tokens], begin) :], tokenizer).items[-1]
        mine = [i for i, e in enumerate(answered) if e.hash(call.agent) == call.request_hash]
        found.update(mine)
        for exchange in (answered[i] for i in mine):
            sent, reply = _read(exchange)
            _same_request(call, prompt, sent, said)
            if len(mine) == 1 and reply is not None:  # equal requests got equal or different answers
                _same_answer(call, output, reply, len(ids))
        said.append(output)
    lost = [e for i, e in enumerate(answered) if e.whole and i not in found]
    assert not lost, f"no complete call has the answer {bytes(lost[0].answer)[:500]!r}"
    return _facts(run, calls)


def _last(ids: list[int], wanted: int) -> int:
    """Where the last of it stands."""
    return len(ids) - 1 - ids[::-1].index(wanted)


def _reader(exchange: Exchange) -> str | None:
    if exchange.method != "POST":
        return None
    return next((end for end in READERS if exchange.path.endswith(end)), None)


def _read(exchange: Exchange) -> tuple[Seen, Reply | None]:
    end = _reader(exchange)
    assert end is not None
    read_request, read_answer = READERS[end]
    return read_request(exchange.body), read_answer(bytes(exchange.answer)) if exchange.whole else None


def _same_request(call: Call, prompt: Seen, sent: Seen, said: list[Item]) -> None:
    where = f"call {call.seq} ({call.kind})"
    assert prompt.tools == sent.tools, where
    assert prompt.items[-1] == Item("assistant", ""), f"{where}: the prompt does not end where the assistant speaks"
    items = prompt.items[:-1]
    assert [i.role for i in items] == [i.role for i in sent.items], where
    for at, (ours, theirs) in enumerate(zip(items, sent.items, strict=True)):
        if ours.role != "assistant":
            assert ours.text == theirs.text, f"{where}, message {at}"
            continue
        assert [name for name, _ in ours.calls] == [name for name, _ in theirs.calls], f"{where}, message {at}"
        # Templates drop old reasoning from what is rendered anew; what was sampled is otherwise as it was given.
        as_given = any(
            (o.text, o.calls) == (ours.text, ours.calls) and ours.reasoning in ("", o.reasoning) for o in said
        )
        assert as_given or (ours.text, ours.calls) == (theirs.text, theirs.calls), f"{where}, message {at}"


def _same_answer(call: Call, output: Item, reply: Reply, length: int) -> None:
    where = f"call {call.seq} ({call.kind})"
    assert (output.reasoning, output.text) == (reply.item.reasoning, reply.item.text), where
    assert output.calls == reply.item.calls, where
    assert (reply.prompt_tokens, reply.output_tokens) == (call.prompt_tokens, length - (call.prompt_tokens or 0)), where


def _facts(run: HarnessRun, calls: list[Call]) -> Facts:
    complete = [c for c in calls if c.status == "complete"]
    with transaction(run.world.db) as session:
        nodes = list(session.scalars(select(Node).where(Node.rollout_id == run.world.ids[run.member])))
    inner = {n.parent_id for n in nodes}
    kinds = {c.leaf_id: c.kind for c in complete}
    return Facts(
        calls=len(complete),
        other=dict(Counter(c.status for c in calls if c.status != "complete")),
        forks=dict(Counter(c.fork_reason for c in complete if c.fork_reason is not None)),
        branches=dict(Counter(kinds[n.id] for n in nodes if n.id not in inner and n.id in kinds)),
        turns=sum(c.kind == "main" for c in complete),
        stored=sum(n.length for n in nodes),
        sent=sum((c.prompt_tokens or 0) + (c.completion_tokens or 0) for c in complete),
    )
