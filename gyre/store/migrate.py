"""Bring a database to the newest schema: Alembic revisions, then the views, which are replaced when they changed.

`python -m gyre.store.migrate upgrade` does so for $GYRE_DATABASE_URL; `… revision "what changed"` writes a new revision
from the difference between that (migrated) database and `gyre.store.models`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from gyre.store.db import make_engine
from gyre.store.models import Base

_MIGRATIONS = Path(__file__).parents[2] / "migrations"
_VIEWS = [Path(__file__).with_name(name) for name in ("views.sql", "content.sql")]
_LOCK = 0x67797265  # any constant: two processes that start together migrate one after the other


class OtherTables(Exception):
    """The database was made by another state of this code; the message is one line that names what is missing."""


def upgrade(url: str) -> None:
    """Migrate to head in one transaction. Does nothing to a database that is there already.

    Raises OtherTables, and nothing is changed, where a table or column is missing afterwards.
    """
    engine = make_engine(url, pool_size=1)
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            command.upgrade(_config(connection), "head")
            _check_tables(connection)
            _apply_views(connection)
    finally:
        engine.dispose()


def _check_tables(connection: Connection) -> None:
    """Until the first release revisions change in place: a database that has them all may still lack a column."""
    query = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    there = {(table, column) for table, column in connection.execute(text(query))}
    wanted = [(table.name, column.name) for table in Base.metadata.sorted_tables for column in table.columns]
    if missing := [f"{table}.{column}" for table, column in wanted if (table, column) not in there]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise OtherTables(
            f"the database was made by another state of this code: it has no {', '.join(missing[:3])}{more}; use "
            'another data folder, or see docs/operating.md, "A data folder of an earlier state"'
        )


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def _apply_views(connection: Connection) -> None:
    sql = "".join(path.read_text() for path in _VIEWS)
    digest = hashlib.sha256(sql.encode()).hexdigest()
    applied = connection.scalar(text("SELECT obj_description(to_regclass('rollout_summary'), 'pg_class')"))
    if applied == digest:
        return
    # Through psycopg itself: the file holds many statements, and its colons are not bind parameters.
    cursor = connection.connection.cursor()
    cursor.execute(sql)
    cursor.execute(f"COMMENT ON VIEW rollout_summary IS '{digest}'")
    cursor.close()


def main(argv: list[str]) -> None:
    """Entry point of `python -m gyre.store.migrate`."""
    url = os.environ.get("GYRE_DATABASE_URL", "")
    if not url or argv[:1] not in (["upgrade"], ["revision"]) or len(argv) != {"upgrade": 1}.get(argv[0], 2):
        raise SystemExit('usage: GYRE_DATABASE_URL=… python -m gyre.store.migrate upgrade | revision "what changed"')
    if argv[0] == "upgrade":
        upgrade(url)
        return
    engine = make_engine(url, pool_size=1)
    with engine.begin() as connection:
        command.revision(_config(connection), message=argv[1], autogenerate=True)
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1:])
