"""What of a run may go: never anything that is still needed to train, to score or to resume."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

# Settled rollouts of steps whose optimizer step is done and of evaluations that ended, without the newest `keep` of
# each.
_OLD = """
    SELECT r.id FROM rollouts r JOIN groups g ON g.id = r.group_id
     WHERE r.run_id = :run AND r.state = 'settled' AND (
           g.step_id IN (SELECT id FROM steps WHERE run_id = :run AND state = 'done' ORDER BY index DESC OFFSET :keep)
        OR g.evaluation_id IN (SELECT id FROM evaluations WHERE run_id = :run AND ended_at IS NOT NULL
                                ORDER BY version DESC OFFSET :keep))
"""
_PRUNED = """'{"pruned": true}'::jsonb"""


@dataclass(frozen=True)
class Amount:
    """Rows, and about how many bytes they hold."""

    rows: int
    size: int


def old_rollouts(session: Session, run_id: str, keep: int) -> list[str]:
    """Settled rollouts of trained steps and ended evaluations, without the newest `keep` of each, by id."""
    return list(session.scalars(text(f"{_OLD} ORDER BY r.id"), {"run": run_id, "keep": keep}))


def old_requests(session: Session, run_id: str, keep: int) -> Amount:
    """The raw request messages of `old_rollouts` that are still there."""
    query = f"""
        SELECT count(*), COALESCE(sum(pg_column_size(request)), 0)::bigint FROM calls
         WHERE rollout_id IN ({_OLD}) AND NOT request ? 'pruned'
    """
    return Amount(*session.execute(text(query), {"run": run_id, "keep": keep}).one())


def prune_requests(session: Session, run_id: str, keep: int) -> int:
    """Drop those messages; tokens, answers and everything else of the calls stays. Returns the calls. Idempotent."""
    query = f"""
        UPDATE calls SET request = jsonb_build_object('base', request -> 'base') || {_PRUNED}
         WHERE rollout_id IN ({_OLD}) AND NOT request ? 'pruned' RETURNING id
    """
    return len(session.scalars(text(query), {"run": run_id, "keep": keep}).all())


def old_cpu_samples(session: Session, run_id: str, days: float) -> Amount:
    """CPU samples older than that."""
    query = f"SELECT count(*), COALESCE(sum(pg_column_size(c.*)), 0)::bigint FROM cpu_samples c WHERE {_CPU}"
    return Amount(*session.execute(text(query), {"run": run_id, "days": days}).one())


def prune_cpu_samples(session: Session, run_id: str, days: float) -> int:
    """Delete them; returns how many."""
    query = f"DELETE FROM cpu_samples WHERE {_CPU} RETURNING id"
    return len(session.scalars(text(query), {"run": run_id, "days": days}).all())


_CPU = "run_id = :run AND at < now() - :days * interval '1 day'"
