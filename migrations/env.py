"""Alembic's entry point. It runs on the connection that `gyre.store.migrate` hands over, in that transaction."""

from __future__ import annotations

from alembic import context

from gyre.store.models import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, compare_server_default=True
)
with context.begin_transaction():
    context.run_migrations()
