"""CPU seconds by component, from two looks at /proc.

A process that lived and ended between two looks is not lost: its parent's `reaped_s` has it, and for children of the
supervisor itself wait4(2) tells it. A process that was seen before and has ended since is counted once: what was
counted while it lived is taken off what its parent's `reaped_s` grew by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from workers.stack.processes import Process, command_line

ORPHAN = "harness"
"""Whatever the supervisor adopts comes from rollouts: all other processes keep their parents."""


@dataclass(frozen=True)
class Owner:
    """Whom seconds are counted for."""

    component: str
    cell: str | None = None


@dataclass(frozen=True)
class _Seen:
    own_s: float
    reaped_s: float
    parent: tuple[int, int] | None
    owner: Owner

    @property
    def total(self) -> float:
        return self.own_s + self.reaped_s


class CpuMeter:
    """Counts for the tree below one process, the supervisor. Not thread-safe."""

    def __init__(self, me: int, divide: Callable[[Process, Owner], Owner] | None = None) -> None:
        """`divide` may give a process another owner than its parent's (an agent's engine, a host's harness)."""
        self._me = me
        self._divide = divide or divide_by_role
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._due: dict[Owner, float] = defaultdict(float)

    def reaped(self, pid: int, total_s: float, root: Owner | None) -> None:
        """The supervisor has waited for a child, which used `total_s` with all that it had waited for itself.

        `root` is its owner where the supervisor started it; None: it was adopted.
        """
        keys = [key for key in self._seen if key[0] == pid]
        before = self._seen.pop(keys[-1]) if keys else None
        owner = root or (before.owner if before else Owner(ORPHAN))
        self._due[owner] += max(0.0, total_s - (before.total if before else 0.0))

    def sample(self, processes: dict[int, Process], roots: dict[int, Owner]) -> dict[Owner, float]:
        """Seconds used by each owner since the sample before. `roots` are the children that the supervisor started."""
        now = self._look(processes, roots)
        ended: dict[tuple[int, int], list[_Seen]] = defaultdict(list)
        for key, seen in self._seen.items():
            if key not in now and seen.parent is not None:
                ended[seen.parent].append(seen)
        due, self._due = self._due, defaultdict(float)
        for key, seen in now.items():
            before = self._seen.get(key)
            due[seen.owner] += max(0.0, seen.own_s - (before.own_s if before else 0.0))
            if key[0] == self._me:
                continue  # what the supervisor reaps is told exactly, by `reaped`
            grown = seen.reaped_s - (before.reaped_s if before else 0.0)
            rest = grown - sum(child.total for child in ended[key])
            if rest > 0:
                heirs = [child.owner for child in ended[key]] or [seen.owner]
                for heir in heirs:
                    due[heir] += rest / len(heirs)
        self._seen = now
        return {owner: seconds for owner, seconds in due.items() if seconds > 0}

    def _look(self, processes: dict[int, Process], roots: dict[int, Owner]) -> dict[tuple[int, int], _Seen]:
        children: dict[int, list[Process]] = defaultdict(list)
        for process in processes.values():
            children[process.parent].append(process)
        found: dict[tuple[int, int], _Seen] = {}
        if self._me not in processes:
            return found
        me = processes[self._me]
        todo = [(me, None, Owner("supervisor"))] if me else []
        queue: list[tuple[Process, tuple[int, int] | None, Owner]] = list(todo)
        while queue:
            process, parent, owner = queue.pop()
            found[process.key] = _Seen(process.own_s, process.reaped_s, parent, owner)
            for child in children[process.pid]:
                queue.append((child, process.key, self._owner(child, process, owner, roots)))
        return found

    def _owner(self, child: Process, parent: Process, inherited: Owner, roots: dict[int, Owner]) -> Owner:
        if parent.pid != self._me:
            return self._divide(child, inherited)
        if child.pid in roots:
            return roots[child.pid]
        before = self._seen.get(child.key)
        return before.owner if before else Owner(ORPHAN)


def divide_by_role(process: Process, inherited: Owner) -> Owner:
    """A cell agent's children are its engine and its trainer; a rollout host's sessions of their own are harnesses."""
    if inherited.component == "agent":
        command = command_line(process.pid)
        return Owner("trainer" if "workers.trainer" in command else "engine", inherited.cell)
    if inherited.component == "rollout-host" and process.session == process.pid:
        return Owner("harness")
    return inherited
