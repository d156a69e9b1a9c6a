"""The database: tables, views, typed queries, and the Postgres server of the local stack."""
