"""What a quorum would have done to the advantages of groups that were trained whole, from their rewards and times.

Plain SQL over columns that every schema had, so that data folders of older versions can be read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, text

from gyre.cli.data import open_database
from gyre.cli.errors import CliError
from gyre.objective import group_advantages
from gyre.store.db import make_engine
from gyre.store.server import PostgresServer

_MEMBERS = """
SELECT r.run_id, s.index AS step, r.group_id, r.reward,
       extract(epoch FROM r.settled_at - r.created_at)::float8 AS seconds,
       (SELECT sum(n.length) FROM nodes n WHERE n.rollout_id = r.id AND n.kind = 'generated')::float8 AS sampled
  FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN steps s ON s.id = g.step_id
 WHERE r.reward IS NOT NULL AND g.state = 'handed_out' ORDER BY r.run_id, s.index, r.group_id, r.settled_at, r.id
"""


@dataclass(frozen=True)
class Group:
    """The rewarded members of one group, in the order in which they settled."""

    run: str
    step: int
    rewards: NDArray[np.float64]
    seconds: NDArray[np.float64]
    sampled: NDArray[np.float64]


@contextmanager
def _database(data: Path) -> Iterator[Engine]:
    """The folder's database: of its living stack, or of a server of our own where the stack is down."""
    try:
        engine = open_database(data)
    except CliError:
        with PostgresServer(data / "postgres") as server:
            engine = make_engine(server.url, pool_size=1)
            yield engine
            engine.dispose()
    else:
        yield engine
        engine.dispose()


def read_groups(data: Path) -> list[Group]:
    """The groups of every step of the runs in a data folder."""
    with _database(data) as engine, engine.connect() as c:
        rows = c.execute(text(_MEMBERS)).all()
    groups: dict[int, list[tuple[object, ...]]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(tuple(row))
    return [
        Group(str(m[0][0]), int(m[0][1]), *(np.array([x[k] or 0.0 for x in m], np.float64) for k in (3, 4, 5)))  # type: ignore[call-overload]
        for m in groups.values()
    ]


def advantages_at(rewards: Sequence[float], quorum: int, *, normalize: bool = True) -> tuple[list[float | None], int]:
    """Advantages in the order of settling, and how many members were handed out at first; as `gyre.store.handout`."""
    given: list[float | None] = [None] * len(rewards)
    first = 0
    for n in range(quorum, len(rewards) + 1):
        result = group_advantages(rewards[:n], normalize, 0.0)
        if result.outcome != "trained":
            continue
        first = first or n
        for i, advantage in enumerate(result.advantages):
            given[i] = advantage if given[i] is None else given[i]
    return given, first


def _corr(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else float("nan")


def _order(group: Group) -> NDArray[np.float64]:
    """Place in the order of settling, 0 to 1."""
    return np.arange(len(group.rewards)) / max(len(group.rewards) - 1, 1)


def report(folders: Sequence[Path], quorums: Sequence[int]) -> None:
    groups = [g for folder in folders for g in read_groups(folder)]
    varied = [g for g in groups if len(g.rewards) > 1 and np.ptp(g.rewards) > 1e-9]
    size = max(len(g.rewards) for g in groups)
    console = Console()
    console.print(
        f"{len(groups)} groups of {len(folders)} runs, {len(varied)} with different rewards; members {size}. "
        f"Correlation of a member's reward with its place in the order of settling: "
        f"{_corr(*_pooled(varied, lambda g: g.rewards)):+.3f}; of its sampled tokens: "
        f"{_corr(*_pooled(varied, lambda g: g.sampled)):+.3f}"
    )
    _show_quorums(console, varied, size, quorums)
    _show_surplus(console, groups, size)


def _pooled(
    groups: Sequence[Group], value: Callable[[Group], NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A value of all members less its mean in the group, and their places less theirs."""
    values = np.concatenate([value(g) - value(g).mean() for g in groups])
    places = np.concatenate([_order(g) - _order(g).mean() for g in groups])
    return values, places


def _show_quorums(console: Console, groups: Sequence[Group], size: int, quorums: Sequence[int]) -> None:
    quorums = [q for q in quorums if q <= size]
    columns = [_effect(groups, quorum) for quorum in quorums]
    title = "a member's advantage at a quorum, less that of the whole group"
    table = Table("quorum", *map(str, quorums), title=title)
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)


def _effect(groups: Sequence[Group], quorum: int) -> dict[str, str]:
    """What `quorum` does to the advantages of `groups`, by name."""
    changes, places, early, sums, flips, saved = [], [], [], [], [], []
    steps: dict[tuple[str, int], list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = {}
    for group in groups:
        rewards = group.rewards.tolist()
        whole = np.array(group_advantages(rewards, True, 0.0).advantages, np.float64)
        parts, first = advantages_at(rewards, min(quorum, len(rewards)))
        given = np.array(parts, np.float64)
        changes.append(given - whole)
        places.append(_order(group) - _order(group).mean())
        early.append(np.arange(len(rewards)) < first)
        sums.append(given.sum())
        flips.append(np.sign(given) != np.sign(whole))
        saved.append(group.seconds.max() - np.sort(group.seconds)[first - 1])
        steps.setdefault((group.run, group.step), []).append((whole, given))
    change, place, is_early = np.concatenate(changes), np.concatenate(places), np.concatenate(early)
    cosines = [_cosine(*map(np.concatenate, zip(*pairs, strict=True))) for pairs in steps.values()]
    late = change[~is_early]
    return {
        "members handed out at once": f"{is_early.mean():.0%}",
        "mean change, of those": f"{change[is_early].mean():+.4f}",
        "mean change, of the rest": f"{late.mean():+.4f}" if len(late) else "none",
        "standard deviation of the change": f"{change.std():.3f}",
        "correlation with the place in the order": f"{_corr(change, place):+.3f}",
        "sum of a group's advantages, mean": f"{np.mean(sums):+.3f}",
        "signs turned": f"{np.concatenate(flips).mean():.2%}",
        "cosine of a step's weights, mean": f"{np.mean(cosines):.4f}",
        "cosine of a step's weights, least": f"{np.min(cosines):.4f}",
        "seconds from the quorum to the last": f"{np.mean(saved):.2f}",
    }


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _show_surplus(console: Console, groups: Sequence[Group], size: int) -> None:
    table = Table(
        "kept", "mean reward kept", "of all", "sampled tokens kept", "of all", "seconds saved",
        title="had the last of each group been surplus",
    )  # fmt: skip
    whole = [g for g in groups if len(g.rewards) == size]
    for kept in (size - 2, size - 1):
        table.add_row(
            f"{kept} of {size}",
            f"{np.mean([g.rewards[:kept].mean() for g in whole]):.3f}",
            f"{np.mean([g.rewards.mean() for g in whole]):.3f}",
            f"{np.mean([g.sampled[:kept].mean() for g in whole]):.1f}",
            f"{np.mean([g.sampled.mean() for g in whole]):.1f}",
            f"{np.mean([g.seconds.max() - np.sort(g.seconds)[kept - 1] for g in whole]):.2f}",
        )
    console.print(table)
