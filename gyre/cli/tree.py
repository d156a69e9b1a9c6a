"""`gyre tree ROLLOUT`: the trajectory tree of one rollout."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.tree import Tree
from sqlalchemy import Connection, Row, text

from gyre.cli.data import DataOption, read_database
from gyre.cli.errors import CliError
from gyre.cli.output import console

_COLOURS = {"main": "green", "main-summary": "cyan", "sub-agent": "magenta", "sub-agent-summary": "blue"}


def tree(
    rollout: Annotated[str, typer.Argument(help="Id of a rollout, e.g. quickstart-s0/s3/05/02.")],
    texts: Annotated[bool, typer.Option("--texts", help="Show what each call answered.")] = False,
    data: DataOption = None,
) -> None:
    """Draw a rollout's nodes and calls with kinds, tokens and policy versions."""
    engine = read_database(data)
    with engine.connect() as c:
        facts = c.execute(text("SELECT * FROM rollout_summary WHERE rollout_id = :id"), {"id": rollout}).first()
        if facts is None:
            raise CliError(f"no rollout {rollout!r}; `gyre rollouts` lists them")
        drawn = _draw(c, facts, texts)
    console().print(drawn)


def _draw(c: Connection, facts: Row[Any], texts: bool) -> Tree:
    reward = "no reward" if facts.reward is None else f"reward {facts.reward:g}"
    why = f" ({facts.exclude_reason})" if facts.exclude_reason else ""
    ended = f"{facts.outcome or facts.state}, {reward}{escape(why)}"
    root = Tree(
        f"[bold]{escape(facts.rollout_id)}[/]  {escape(facts.task)}  {ended}"
        f"  {facts.calls} calls, {facts.tree_tokens} tokens in the tree, {facts.sampled_tokens} sampled"
    )
    nodes: dict[int | None, list[Row[Any]]] = defaultdict(list)
    for node in c.execute(text(_NODES), {"id": facts.rollout_id}):
        nodes[node.parent_id].append(node)
    # Long conversations are deep: an explicit stack, since Python's recursion has an end.
    todo: list[tuple[Tree, Row[Any]]] = [(root, n) for n in reversed(nodes[None])]
    while todo:
        above, node = todo.pop()
        below = nodes[node.id]
        shown = above.add(_label(node, texts))
        # A line of single children stays at one depth, or a long rollout would leave the screen.
        place = above if len(below) == 1 and len(nodes[node.parent_id]) == 1 else shown
        todo += [(place, child) for child in reversed(below)]
    for call in c.execute(text(_UNFINISHED), {"id": facts.rollout_id}):
        root.add(f"[red]call {call.seq} {call.status}[/] ({call.kind}), no node")
    return root


def _label(node: Row[Any], texts: bool) -> str:
    if node.kind == "prompt":
        reason = f"  [yellow]fork: {escape(node.fork_reason)}[/]" if node.fork_reason not in (None, "root") else ""
        return f"[dim]prompt    +{node.length} tokens from {node.start}[/]{reason}"
    versions = ", ".join(f"v{span[0]}: {span[2] - span[1]}" for span in node.version_spans or [])
    parts = [
        f"[{_COLOURS.get(node.call_kind, 'white')}]generated +{node.length}[/]",
        f"call {node.seq} {node.call_kind}",
        versions,
        f"on {', '.join(node.cells)}" if node.cells else "",
        node.finish_reason or node.status or "",
        "[bold]trained[/]" if node.trained else "",
    ]
    label = "  ".join(part for part in parts if part)
    return f"{label}\n{escape(_answer(node.response))}" if texts and node.response else label


def _answer(response: dict[str, Any]) -> str:
    """What an OpenAI Chat answer says, else the whole answer."""
    try:
        message = response["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        return str(response)
    calls = [f"{t['function']['name']} {t['function']['arguments']}" for t in message.get("tool_calls") or []]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])


_NODES = """
SELECT n.id, n.parent_id, n.kind, n.start, n.length, n.version_spans, c.seq, c.kind AS call_kind, c.status, c.cells,
       c.finish_reason, c.fork_reason, c.response,
       EXISTS (SELECT 1 FROM samples s WHERE s.rollout_id = n.rollout_id AND n.id = ANY (s.owned_nodes)) AS trained
FROM nodes n LEFT JOIN calls c ON c.id = n.call_id WHERE n.rollout_id = :id ORDER BY n.id
"""

_UNFINISHED = """
SELECT seq, status, kind FROM calls WHERE rollout_id = :id AND leaf_id IS NULL ORDER BY seq
"""
