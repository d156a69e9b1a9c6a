"""Whose call it is and of what kind: agents that interleave, titles, summaries, with and without a dialect's word."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gyre.gateway.dialect import Hint
from gyre.gateway.messages import Message
from gyre.gateway.policy import Policy
from gyre.gateway.tree import WALKS, Turn
from tests.gateway.paper import CALL, SYSTEM, Paper, request, result, user

ASK = [SYSTEM, user("Do the work.")]
SUMMARY = "What was done so far: everything.\nWhat is left: nothing at all."
END = "<|im_end|>"
SUB = [Message("system", "You are a sub-agent."), user("Look around.")]


def renamed(turn: Turn, name: str) -> Turn:
    """A turn whose tool call has an id of its own, as every sampled call has."""
    calls = tuple(replace(c, id=name) for c in turn.reply.tool_calls)
    turn.reply = replace(turn.reply, tool_calls=calls)
    return turn


@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("same_results", [True, False])
def test_sub_agents_with_equal_prompts_interleave(policy: Policy, headers: bool, same_results: bool) -> None:
    """Case 6: two agents, word for word the same, with agent ids and without: each goes on from its own answers."""
    paper = Paper(policy)
    paper.call(ASK, CALL + END)
    histories = {"a": list(SUB), "b": list(SUB)}
    hints = {name: Hint(agent=name) if headers else Hint() for name in histories}
    lines: dict[str, list[Turn]] = {"a": [], "b": []}
    for step in range(4):
        for name, history in histories.items():
            turn = renamed(paper.call(history, CALL + END, hint=hints[name]), f"{name}{step}")
            lines[name].append(turn)
            out = "same" if same_results else f"{name} {step}"
            histories[name] = [*history, turn.reply, replace(result(out), tool_call_id=f"{name}{step}")]
    for turns in lines.values():
        for before, after in itertools.pairwise(turns):
            assert after.parent is before
        assert {t.kind for t in turns} == {"sub-agent"}
    assert lines["a"][0].prompt is lines["b"][0].prompt, "what they have in common is stored once"


def test_an_agent_that_begins_with_what_another_said_is_a_branch_of_its_own(policy: Policy) -> None:
    paper = Paper(policy)
    first = paper.call(ASK, CALL + END)
    history = [*ASK, first.reply, result("r")]
    side = paper.call([*history, user("You are a fork.")], "done" + END, hint=Hint(agent="fork"))
    assert (side.parent, side.kind) == (first, "sub-agent")
    main = paper.plan(history)
    assert (main.fork_reason, main.turn, main.kind) == (None, first, "main"), "the fork is no sibling of the main one"
    assert paper.plan([*history, user("You are a fork.")], hint=Hint(agent="fork")).fork_reason == "resample"
    again = paper.plan([*history, user("You are a fork."), side.reply, user("x")], hint=Hint(agent="fork"))
    assert (again.turn, again.kind, again.fork_reason) == (side, "sub-agent", None)


def test_reason_of_a_fork_to_another_agent(policy: Policy) -> None:
    paper = Paper(policy)
    first = paper.call(ASK, CALL + END)
    assert paper.plan([*ASK, first.reply, result("r")], hint=Hint(agent="x")).fork_reason == "other_agent"


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("first", ["title", "work"])
def test_a_title_beside_the_first_call(policy: Policy, finished: bool, first: str) -> None:
    """Case 5: whichever comes first, finished or still running when the other arrives."""
    paper = Paper(policy)
    title = [Message("system", "Write a title."), user("Do the work.")]
    asked = {"title": (title, False), "work": (ASK, True)}
    order = [first, "work" if first == "title" else "title"]
    running = {}
    for name in order:
        messages, tools = asked[name]
        running[name] = (*paper.begin(messages, tools), request(messages, tools))
        if finished:
            paper.end(*running[name], "done" + END)
    if not finished:
        for name in reversed(order):
            paper.end(*running[name], "done" + END)
    assert paper.kind_of(running["title"][0]) == "auxiliary"
    assert paper.kind_of(running["work"][0]) == "main"


def test_a_conversation_without_tools_that_went_on_stays_main(policy: Policy) -> None:
    paper = Paper(policy)
    first = paper.call(ASK, "done" + END, tools=False)
    paper.call([*ASK, first.reply, user("more")], "done" + END, tools=False)
    other = paper.call(SUB, "done" + END)
    assert (first.kind, other.kind) == ("main", "sub-agent")


def test_what_the_dialect_says_is_not_changed(policy: Policy) -> None:
    paper = Paper(policy)
    first = paper.call([user("hi")], "done" + END, tools=False, hint=Hint("main"))
    second = paper.call(ASK, "done" + END)
    assert first.kind == "main"
    assert second.kind == "sub-agent"
    assert paper.call([user("t")], "done" + END, hint=Hint("auxiliary")).kind == "auxiliary"


@pytest.mark.parametrize("agent", ["", "x"])
@pytest.mark.parametrize("tools_dropped", [True, False])
@pytest.mark.parametrize("quote", ["So far:\n{}", "{}", "<summary>{}</summary> Go on.", "- {}"])
def test_a_summary_is_known_by_what_becomes_of_it(policy: Policy, agent: str, tools_dropped: bool, quote: str) -> None:
    """Compaction of a harness of which nothing is known: its answer turns up where the conversation begins anew."""
    paper, hint = Paper(policy), Hint(agent=agent)
    base = "sub-agent" if agent else "main"
    if agent:
        paper.call(ASK, CALL + END)
    first = paper.call(SUB if agent else ASK, CALL + END, hint=hint)
    history = [*(SUB if agent else ASK), first.reply, result("r")]
    second = paper.call(history, CALL + END, hint=hint)
    history += [second.reply, result("r2"), user("Summarise all this.")]
    asked = paper.call(history, SUMMARY + END, tools=not tools_dropped, hint=hint)
    assert asked.kind in ("main", "sub-agent", "auxiliary")
    beginning = [(SUB if agent else ASK)[0], user(quote.format(SUMMARY)), second.reply, result("r2")]
    renewed = paper.call(beginning, CALL + END, hint=hint)
    assert (asked.kind, renewed.kind) == (f"{base}-summary", base)
    assert first.kind == second.kind == base
    goes_on = paper.call([*beginning, renewed.reply, result("r3")], "done" + END, hint=hint)
    assert (goes_on.parent, goes_on.kind) == (renewed, base)


def test_an_answer_that_is_quoted_elsewhere_is_no_summary(policy: Policy) -> None:
    """A sub-agent's report, handed on to the next one: it was no summary, for nobody asked for one."""
    paper = Paper(policy)
    paper.call(ASK, CALL + END)
    looking = paper.call(SUB, CALL + END)
    report = paper.call([*SUB, looking.reply, result("files")], SUMMARY + END)
    other = paper.call([SUB[0], user(f"The scout says:\n{SUMMARY}")], "done" + END)
    assert (report.kind, other.kind) == ("sub-agent", "sub-agent")


@pytest.mark.parametrize("other", ["system", "tools"])
def test_an_answer_that_another_conversation_quotes_is_no_summary(policy: Policy, other: str) -> None:
    """A report that a critic or a side question is given: neither is where the work goes on."""
    paper = Paper(policy)
    first = paper.call(ASK, CALL + END)
    report = paper.call([*ASK, first.reply, result("r"), user("Report.")], SUMMARY + END)
    system = SYSTEM if other == "tools" else Message("system", "You are a critic.")
    quoting = paper.call([system, user(f"Judge this:\n{SUMMARY}")], "done" + END, tools=other != "tools")
    assert report.kind == "main"
    assert quoting.kind == {"system": "sub-agent", "tools": "auxiliary"}[other]


@pytest.mark.parametrize("late", [True, False])
def test_a_planner_without_tools_stays_main_beside_its_executor(policy: Policy, late: bool) -> None:
    """Its second turn says that its first was no title, whether it comes before or after the executor is done."""
    paper = Paper(policy)
    planner = paper.call([Message("system", "Plan."), user("x")], "a plan" + END, tools=False)
    history = [Message("system", "Plan."), user("x"), planner.reply, user("done; next?")]
    running, asked = paper.begin(ASK), request(ASK, True)
    if not late:
        second = (*paper.begin(history, tools=False), request(history, False))
    executor = paper.end(*running, asked, CALL + END)
    assert planner.kind == "auxiliary", "so far it looks like a title"
    turn = paper.call(history, "more" + END, tools=False) if late else paper.end(*second, "more" + END)
    assert (turn.parent, turn.kind, planner.kind, executor.kind) == (planner, "main", "main", "main")
    history += [turn.reply, user("and next?")]
    assert paper.call(history, "end" + END, tools=False).kind == "main"
    assert paper.call([Message("system", "Plan."), user("y")], "a plan" + END, tools=False).kind == "main"
    assert paper.call([Message("system", "Write a title."), user("y")], "t" + END, tools=False).kind == "auxiliary"


def test_an_auxiliary_call_that_the_dialect_told_stays_so_when_it_goes_on(policy: Policy) -> None:
    paper = Paper(policy)
    paper.call(ASK, CALL + END)
    told = paper.call([user("check")], "done" + END, tools=False, hint=Hint("auxiliary"))
    history = [user("check"), told.reply, user("again")]
    second = paper.call(history, "done" + END, tools=False)
    third = paper.call([*history, second.reply, user("once more")], "done" + END, tools=False)
    assert [t.kind for t in (told, second, third)] == ["auxiliary"] * 3


def test_nothing_is_concluded_from_a_call_that_comes_to_nothing(policy: Policy) -> None:
    paper = Paper(policy)
    first = paper.call([Message("system", "Answer."), user("x")], "done" + END, tools=False)
    call_id, _ = paper.begin(ASK)
    paper.kinds.drop(call_id)
    assert first.kind == "main"
    paper.call(ASK, CALL + END)
    assert first.kind == "auxiliary"


@pytest.mark.parametrize("agent", ["main", "sub-agent"])
def test_a_last_step_without_tools_is_of_its_conversation(policy: Policy, agent: str) -> None:
    """A harness at its step limit: the whole history once more, an old result cut, and no tools to answer with."""
    paper = Paper(policy)
    opened = paper.call(ASK, CALL + END)
    base = ASK if agent == "main" else SUB
    first = opened if agent == "main" else paper.call(base, CALL + END)
    history = [*base, first.reply, result("r")]
    second = paper.call(history, CALL + END)
    echo = replace(second.reply, tool_calls=tuple(replace(c, id="new") for c in second.reply.tool_calls))
    asked = [*base, first.reply, result("[cut]"), echo, result("r2"), user("Answer now.")]
    last = paper.call(asked, "the answer" + END, tools=False)
    assert (last.parent, last.kind) == (None, agent)
    assert paper.call([base[0], user("A title?")], "t" + END, tools=False).kind == "auxiliary"
    stranger = [Message("system", "Judge."), *asked[1:]]
    assert paper.call(stranger, "good" + END, tools=False).kind == "auxiliary"


def test_after_a_summary_in_place_the_branch_is_what_it_was(policy: Policy) -> None:
    paper = Paper(policy)
    first = paper.call(ASK, CALL + END)
    history = [*ASK, first.reply, result("r"), user("Summarise.")]
    summary = paper.call(history, SUMMARY + END, hint=Hint("main-summary"))
    assert paper.plan([*history, summary.reply, user("Go on.")]).kind == "main"


def test_the_kind_of_a_first_call_that_failed_is_forgotten(policy: Policy) -> None:
    paper = Paper(policy)
    call_id, planned = paper.begin([Message("system", "Write a title."), user("x")], tools=False)
    assert planned.kind == "main"
    paper.kinds.drop(call_id)
    assert paper.plan(ASK).kind == "main"
    assert not paper.plan(ASK).verdict.changes


def test_many_agents_leave_nothing_behind_but_their_turns(policy: Policy) -> None:
    """What is remembered for speed is bounded; an agent that was forgotten is matched as well."""
    paper = Paper(policy)
    histories = {f"agent {i}": [*SUB] for i in range(3 * WALKS)}
    for step in range(2):
        for name, history in histories.items():
            turn = paper.call(history, CALL + END, hint=Hint(agent=name))
            assert turn.agent == name
            assert (turn.parent is None) == (step == 0)
            histories[name] = [*history, turn.reply, result(f"{name} {step}")]
    assert len(paper.tree._walks) <= WALKS
