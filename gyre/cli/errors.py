"""Errors that a person can do something about."""

from __future__ import annotations


class CliError(Exception):
    """Printed as one line `gyre: <message>`, without a traceback; the command ends with exit code `code`."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
