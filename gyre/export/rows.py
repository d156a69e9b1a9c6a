"""The rows that belong to a run, a step or a rollout: read from one database, and inserted into another.

Ids of the other database may be taken, so every row gets a fresh one, in the order of the old ones; what refers to a
row follows it. Tokens of rollouts (path prefixes, API keys) never leave: an imported rollout gets a fresh one. Nor do
the values of `harness.env`, which may be keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb
from sqlalchemy import BigInteger, Connection, Table, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from gyre.export.errors import ExportError
from gyre.store.models import Base
from gyre.store.names import new_token

Row = dict[str, Any]

# In an order in which each refers to those before it, but for calls.leaf_id and the nodes in micro_batches.metrics.
_WHERE = {
    "token_pieces": "vocabulary IN (SELECT vocabulary FROM runs WHERE id = :run)",
    "runs": "id = :run",
    "steps": "run_id = :run AND (:whole"
    " OR id IN (SELECT step_id FROM groups WHERE id IN (SELECT group_id FROM scope)))",
    "evaluations": "run_id = :run AND (:whole"
    " OR id IN (SELECT evaluation_id FROM groups WHERE id IN (SELECT group_id FROM scope)))",
    "groups": "run_id = :run AND (:whole OR id IN (SELECT group_id FROM scope))",
    "rollouts": "id IN (SELECT id FROM scope)",
    "scores": "rollout_id IN (SELECT id FROM scope)",
    "micro_batches": "id IN (SELECT micro_batch_id FROM samples WHERE rollout_id IN (SELECT id FROM scope))",
    "calls": "rollout_id IN (SELECT id FROM scope)",
    "nodes": "rollout_id IN (SELECT id FROM scope)",
    "samples": "rollout_id IN (SELECT id FROM scope)",
}
_SCOPE = """
    WITH scope AS (
        SELECT r.id, r.group_id FROM rollouts r JOIN groups g ON g.id = r.group_id LEFT JOIN steps s ON s.id = g.step_id
         WHERE r.run_id = :run AND (:whole OR s.index = :step OR r.id = :rollout))
"""
# Parents before children, where a table refers to itself.
_ORDER = {"calls": "rollout_id, seq", "nodes": "rollout_id, start, id"}
TABLES: dict[str, Table] = {name: Base.metadata.tables[name] for name in _WHERE}
SECRET = {"rollouts": ("token",)}
"""Columns that are never exported."""
_BATCH = 500
_RUN = re.compile(r"[a-z0-9][a-z0-9-]*")
_ROLLOUT = re.compile(r"([a-z0-9][a-z0-9-]*)/([se]\d+/\d+/\d+)")


@dataclass(frozen=True)
class Scope:
    """What is exported: a run, one of its steps (0-based index), or one of its rollouts."""

    run: str
    step: int | None = None
    rollout: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        whole = self.step is None and self.rollout is None
        return {"run": self.run, "step": self.step, "rollout": self.rollout, "whole": whole}


def columns(table: str) -> list[str]:
    """The columns that are exported."""
    return [c.name for c in TABLES[table].columns if c.name not in SECRET.get(table, ())]


def read(connection: Connection, scope: Scope, table: str) -> Iterator[list[Row]]:
    """The rows of `table` in `scope`, a batch at a time, in an order in which they can be inserted."""
    names = columns(table)
    order = _ORDER.get(table) or ", ".join(c.name for c in TABLES[table].primary_key)
    picked = ", ".join(f'"{name}"' for name in names)
    query = text(f"{_SCOPE} SELECT {picked} FROM {table} WHERE {_WHERE[table]} ORDER BY {order}")
    result = connection.execute(query, scope.parameters, execution_options={"yield_per": _BATCH})
    for batch in result.mappings().partitions():
        rows = [dict(row) for row in batch]
        yield [row | {"config": _without_secrets(row["config"])} for row in rows] if table == "runs" else rows


def _without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without the values of the harness's environment; its names stay."""
    harness = config.get("harness") or {}
    if not harness.get("env"):
        return config
    return config | {"harness": harness | {"env": dict.fromkeys(harness["env"], "***")}}


def check_scope(connection: Connection, scope: Scope) -> None:
    """Raises ExportError where the scope names nothing."""
    if connection.scalar(text("SELECT 1 FROM runs WHERE id = :run"), {"run": scope.run}) is None:
        raise ExportError(f"no run {scope.run!r} in this database")
    if scope.rollout is not None or scope.step is not None:
        found = connection.scalar(text(f"{_SCOPE} SELECT count(*) FROM scope"), scope.parameters)
        if not found:
            what = f"rollout {scope.rollout!r}" if scope.rollout is not None else f"step {scope.step}"
            raise ExportError(f"{what}: run {scope.run} has none; `gyre rollouts --run {scope.run}` lists what it has")


class Importer:
    """Inserts exported rows as one run, in the order of `TABLES`, within the connection's transaction.

    `run_id`: the name that the run gets here; None: the one that it had. The run is archived: no workflow goes on
    with it.
    """

    def __init__(self, connection: Connection, run_id: str | None = None) -> None:
        self._connection = connection
        self.run_id = run_id or ""
        self._old_run = ""
        self._ids: dict[str, dict[int, int]] = {}
        self._leaves: list[tuple[int, int]] = []
        self._rejected: list[tuple[int, Row]] = []

    def reserve(self, table: str, ids: Sequence[int]) -> None:
        """Give each of the table's old ids a fresh one, before its rows are inserted. Order is kept."""
        query = text("SELECT nextval(pg_get_serial_sequence(:table, 'id')) FROM generate_series(1, :n)")
        fresh = self._connection.execute(query, {"table": table, "n": len(ids)}).scalars()
        self._ids[table] = dict(zip(sorted(ids), fresh, strict=True))

    def insert(self, table: str, batches: Iterable[list[Row]]) -> int:
        """Insert rows, parents first; returns how many. Raises ExportError."""
        count = 0
        for batch in batches:
            if table == "runs":
                self._name_run(batch)
            if batch:
                self._insert(table, [self._moved(table, row) for row in batch])
                count += len(batch)
        if table == "nodes":
            self._name_nodes()
        return count

    def _name_nodes(self) -> None:
        """In rows that were inserted before the nodes that they name."""
        if self._leaves:
            query = text("UPDATE calls SET leaf_id = :leaf WHERE id = :call")
            leaves = [{"call": c, "leaf": self._id("nodes", leaf, "calls.leaf_id")} for c, leaf in self._leaves]
            self._connection.execute(query, leaves)
        if self._rejected:
            metrics = bindparam("metrics", type_=JSONB)
            query = text("UPDATE micro_batches SET metrics = metrics || :metrics WHERE id = :id").bindparams(metrics)
            # Of a part of a run, its other rollouts' nodes stay behind.
            ids = self._ids["nodes"]
            moved = [(i, {ids[int(n)]: k for n, k in by.items() if int(n) in ids}) for i, by in self._rejected]
            self._connection.execute(query, [{"id": i, "metrics": {"rejected_by_node": by}} for i, by in moved])

    def _name_run(self, batch: list[Row]) -> None:
        if len(batch) != 1 or self._old_run not in ("", batch[0]["id"]):
            raise ExportError(f"one run at a time: found {sorted({self._old_run, *(r['id'] for r in batch)} - {''})}")
        self._old_run = str(batch[0]["id"])
        self.run_id = self.run_id or self._old_run
        if not _RUN.fullmatch(self.run_id):
            raise ExportError(f"run {self.run_id!r}: a name is small letters, digits and dashes; give one with --as")
        if self._connection.scalar(text("SELECT 1 FROM runs WHERE id = :run"), {"run": self.run_id}) is not None:
            raise ExportError(f"run {self.run_id} is in this database already; give it another name with --as")

    def _moved(self, table: str, row: Row) -> Row:
        unknown = row.keys() - {c.name for c in TABLES[table].columns}
        if unknown:
            raise ExportError(
                f"{table}: no column {sorted(unknown)[0]!r} here; it was exported by another version of Gyre"
            )
        moved = dict(row)
        if table == "runs":
            moved |= {"id": self.run_id, "state": "archived"}
        elif has_serial_id(table):
            moved["id"] = self._id(table, row["id"], "id")
        elif table == "rollouts":
            moved |= {"id": self._renamed(row["id"]), "token": new_token()}
        for column in TABLES[table].columns:
            for key in column.foreign_keys:
                to, value = key.column.table.name, moved.get(column.name)
                if value is None:
                    continue
                if to == "runs":
                    moved[column.name] = self.run_id
                elif to == "rollouts":
                    moved[column.name] = self._renamed(value)
                elif (table, column.name) == ("calls", "leaf_id"):  # its node comes later
                    self._leaves.append((moved["id"], value))
                    moved[column.name] = None
                elif to in TABLES:
                    moved[column.name] = self._id(to, value, f"{table}.{column.name}")
        if table == "micro_batches" and (by := row["metrics"].get("rejected_by_node")):  # its nodes come later
            self._rejected.append((moved["id"], by))
        if table == "samples":
            moved["owned_nodes"] = [self._id("nodes", n, "samples.owned_nodes") for n in row["owned_nodes"]]
        return moved

    def _id(self, table: str, old: int, what: str) -> int:
        try:
            return self._ids[table][old]
        except KeyError:
            raise ExportError(f"{what}: row {old} of {table} is missing; the export is not whole") from None

    def _renamed(self, rollout_id: str) -> str:
        # Names of rollouts become folders: nothing else may come in as one.
        parts = _ROLLOUT.fullmatch(rollout_id)
        if parts is None or parts[1] != self._old_run:
            raise ExportError(f"rollouts: {rollout_id!r} is no rollout of run {self._old_run}")
        return f"{self.run_id}/{parts[2]}"

    def _insert(self, table: str, rows: list[Row]) -> None:
        names = list(rows[0])
        json = {c.name for c in TABLES[table].columns if isinstance(c.type, JSONB)}
        cursor = self._connection.connection.cursor()
        target = sql.Identifier("imported_pieces" if table == "token_pieces" else table)
        if table == "token_pieces":  # of which this database may have some
            cursor.execute("CREATE TEMPORARY TABLE IF NOT EXISTS imported_pieces (LIKE token_pieces) ON COMMIT DROP")
        into = sql.SQL("COPY {} ({}) FROM STDIN").format(target, sql.SQL(", ").join(map(sql.Identifier, names)))
        with cursor.copy(into) as copy:
            for row in rows:
                values = ((name, row[name]) for name in names)
                copy.write_row([Jsonb(v) if name in json and v is not None else v for name, v in values])
        if table == "token_pieces":
            cursor.execute("INSERT INTO token_pieces SELECT * FROM imported_pieces ON CONFLICT DO NOTHING")
            cursor.execute("TRUNCATE imported_pieces")
        cursor.close()


def has_serial_id(table: str) -> bool:
    """Whether rows get their ids from a sequence of the database."""
    key = TABLES[table].primary_key.columns.values()
    return len(key) == 1 and isinstance(key[0].type, BigInteger)
