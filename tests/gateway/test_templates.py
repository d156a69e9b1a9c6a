"""What harnesses send and templates differ on: late system messages, assistant turns side by side, or at the end."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from gyre.config import PolicyConfig
from gyre.gateway.errors import GatewayError
from gyre.gateway.messages import Message, ToolCall
from gyre.gateway.policy import Policy
from tests.gateway.conftest import BASH
from tests.gateway.markov import tokenizer
from tests.gateway.paper import Paper, user

MORE = (
    "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <|user|> <|assistant|> <|system|> <|observation|> "
    "<sop> [gMASK] <arg_key> </arg_key> <arg_value> </arg_value> <|begin_of_text|> <|start_header_id|> "
    "<|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|> <|python_tag|>"
)
SYSTEM, LATE = Message("system", "Be good."), Message("system", "By the way.")
SAID = Message("assistant", "I say.")
ANSWERS = {
    "qwen3": "done<|im_end|>", "qwen3.5": "</think>\n\ndone<|im_end|>", "llama-3": "done<|eot_id|>",
    "glm-4.5": "done<|user|>",
}  # fmt: skip


@pytest.fixture(scope="module", params=list(ANSWERS))
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("policy")
    made = tokenizer()
    made.add_special_tokens([AddedToken(t, special=True) for t in MORE.split()])
    made.save(str(folder / "tokenizer.json"))
    return Policy(PolicyConfig(path=folder, context=10_000, renderer=request.param))


def answer(policy: Policy) -> list[int]:
    """A whole answer, as this policy would give one."""
    made = [policy.tokenizer.encode(text, add_special_tokens=False) for text in ANSWERS.values()]
    if policy.text(policy.opening([user("a")], [])).endswith("<think>\n"):
        return made[1]
    return next(ids for ids in made if ids[-1] in policy.stop_ids)


CASES = {
    "a late system message": [LATE, user("b")],
    "nothing but a late system message": [LATE],
    "an answer that was not sampled": [user("b"), SAID, user("c")],
    "two answers side by side": [SAID, user("c")],
    "two more answers": [user("b"), SAID, SAID, user("c")],
    "an answer at the end": [user("b"), SAID],
    "two answers at the end": [SAID, SAID],
    "nothing more": [],
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_conversation_goes_on_and_keeps_what_was_sampled(policy: Policy, name: str) -> None:
    paper = Paper(policy)
    history = [SYSTEM, LATE, user("a")]
    first = paper.call(history, answer(policy))
    history += [first.reply, *CASES[name]]
    planned = paper.plan(history)
    said = policy.text(planned.prompt_ids().tolist())
    for message in history:
        assert message.content in said
    assert said.count("I say.") == sum(m is SAID for m in history)
    second = paper.call(history, answer(policy))
    assert second.parent is first
    assert first.generated.ids.tolist() == answer(policy)
    before = first.generated.tokens().tolist()
    if planned.anchor is first:
        assert planned.prompt_ids().tolist()[: len(before)] == before
    else:  # GLM's answers end on the token that opens the user's turn: what else comes is rendered as a whole
        assert policy.again(answer(policy)) is None
    after = paper.plan([*history, second.reply, user("z")])
    assert after.turn is second


def test_what_a_template_refuses_is_the_callers_error(policy: Policy) -> None:
    """Llama 3 has no two calls in one turn."""
    calls = tuple(ToolCall(f"c{i}", "bash", '{"command": "ls"}') for i in range(2))
    two = [user("a"), Message("assistant", "", None, calls), *(Message("tool", "r", tool_call_id=c.id) for c in calls)]
    if "<|eot_id|>" not in policy.text(policy.stop_ids):
        assert policy.opening(two, [BASH])
        return
    for attempt in (lambda: policy.opening(two, [BASH]), lambda: policy.foreign(two[1], [BASH])):
        with pytest.raises(GatewayError, match="chat template refuses") as caught:
            attempt()
        assert caught.value.status == 400
