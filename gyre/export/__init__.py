"""Runs out of the database and back: as Parquet (tables) and as ATIF (one trajectory file a rollout)."""

from gyre.export.atif import export_atif, import_atif
from gyre.export.errors import ExportError
from gyre.export.parquet import export_parquet, import_parquet
from gyre.export.rows import Scope

__all__ = ["ExportError", "Scope", "export_atif", "export_parquet", "import_atif", "import_parquet"]
