"""One row by its key, with an error that says which one is missing."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy.orm import Session

from gyre.store.models import Base

_T = TypeVar("_T", bound=Base)


class MissingRow(LookupError):
    """A row that the caller named does not exist."""


def the_row(session: Session, model: type[_T], key: Any, *, lock: bool = False) -> _T:
    """The row of `model` with primary key `key`, read afresh; `lock` holds it until the transaction ends.

    Raises MissingRow.
    """
    # FOR NO KEY UPDATE: others may go on inserting rows that refer to this one, as the gateway does to a rollout.
    mode = {"key_share": True} if lock else None
    row = session.get(model, key, with_for_update=mode, populate_existing=True)
    if row is None:
        raise MissingRow(f"{model.__tablename__}: no row {key!r}")
    return row
