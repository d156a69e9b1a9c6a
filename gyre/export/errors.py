"""What can be wrong with an export or an import."""

from __future__ import annotations


class ExportError(ValueError):
    """One line that names the file, run or row, and what to do."""
