"""Alembic revisions; run by `gyre.store.migrate`."""
