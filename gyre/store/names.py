"""Identities that are made once and used everywhere."""

from __future__ import annotations

import re
import secrets

_SCOPE = re.compile(r"[se]\d+")


def rollout_id(run_id: str, scope: str, position: int, member: int) -> str:
    """`<run>/<scope>/<position>/<member>`, for example `demo-s0/s3/05/02`.

    `scope` is `s<step index>` for training and `e<policy version>` for an evaluation. Raises ValueError otherwise.
    """
    if not _SCOPE.fullmatch(scope):
        raise ValueError(f"rollout id: scope must be s<step> or e<version>, got {scope!r}")
    if position < 0 or member < 0:
        raise ValueError(f"rollout id: position and member must not be negative, got {position} and {member}")
    return f"{run_id}/{scope}/{position:02d}/{member:02d}"


def new_token() -> str:
    """An unguessable, URL-safe token of 192 bits: the path prefix and API key of one rollout."""
    return secrets.token_urlsafe(24)
