-- What a person asks the database. `gyre.store.migrate` runs this file whenever it changed; it replaces everything it
-- makes, so it may be edited freely. Names are those of the design: rollout, branch, node, sample, step.

DROP VIEW IF EXISTS version_span, owned_span, message, tool_call, reward; -- of content.sql, which comes after
DROP VIEW IF EXISTS rollout_summary, branch, step_summary, token_accounting, fate, clip_by_length, cell_time, role_change_phase;
DROP FUNCTION IF EXISTS path_nodes(bigint), path_tokens(bigint), tokens(bigint), logprobs(bigint),
    gyre_continued(bigint, boolean), gyre_int32(bytea), gyre_float32(bytea);

-- Little-endian int32, as gyre.store.tokens packs token ids.
CREATE FUNCTION gyre_int32(data bytea) RETURNS int[] LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT COALESCE(array_agg(get_byte(data, 4 * i) | (get_byte(data, 4 * i + 1) << 8)
                              | (get_byte(data, 4 * i + 2) << 16) | (get_byte(data, 4 * i + 3) << 24) ORDER BY i), '{}')
      FROM generate_series(0, octet_length(data) / 4 - 1) AS i
$$;

-- Little-endian IEEE 754 float32, as gyre.store.tokens packs log-probs.
CREATE FUNCTION gyre_float32(data bytea) RETURNS real[] LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT COALESCE(array_agg(
             CASE WHEN exponent = 255 AND fraction > 0 THEN 'NaN'::real
                  WHEN exponent = 255 THEN (CASE WHEN bits < 0 THEN '-Infinity' ELSE 'Infinity' END)::real
                  ELSE ((CASE WHEN bits < 0 THEN -1 ELSE 1 END)
                        * (CASE WHEN exponent = 0 THEN 0 ELSE 1 END + fraction / 8388608.0::float8)
                        * 2.0::float8 ^ (GREATEST(exponent, 1) - 127))::real END ORDER BY i), '{}')
      FROM (SELECT i, bits, (bits >> 23) & 255 AS exponent, bits & 8388607 AS fraction
              FROM unnest(gyre_int32(data)) WITH ORDINALITY AS word(bits, i)) AS parts
$$;

-- Token ids of one node.
CREATE FUNCTION tokens(node_id bigint) RETURNS int[] LANGUAGE sql STABLE AS $$
    SELECT gyre_int32(token_ids) FROM nodes WHERE id = node_id
$$;

-- Log-probs of one generated node, as the sampler gave them.
CREATE FUNCTION logprobs(node_id bigint) RETURNS real[] LANGUAGE sql STABLE AS $$
    SELECT gyre_float32(logprobs) FROM nodes WHERE id = node_id
$$;

-- The nodes from the root to a leaf (or any other node), root first.
CREATE FUNCTION path_nodes(leaf_id bigint) RETURNS SETOF nodes LANGUAGE sql STABLE ROWS 20 AS $$
    WITH RECURSIVE path AS (
        SELECT id, parent_id FROM nodes WHERE id = leaf_id
        UNION ALL
        SELECT up.id, up.parent_id FROM path JOIN nodes up ON up.id = path.parent_id)
    SELECT n.* FROM path JOIN nodes n ON n.id = path.id ORDER BY n.start
$$;

-- All token ids from the root to a leaf: what the model read and wrote on that branch.
CREATE FUNCTION path_tokens(leaf_id bigint) RETURNS int[] LANGUAGE sql STABLE AS $$
    SELECT gyre_int32(string_agg(token_ids, '' ORDER BY start)) FROM path_nodes(leaf_id)
$$;

-- Whether a complete call generated something below the node; auxiliary calls count only when asked for. The descent
-- ends at the first such call of each line, so a long conversation costs one step a node.
CREATE FUNCTION gyre_continued(node_id bigint, by_auxiliary boolean) RETURNS boolean LANGUAGE sql STABLE AS $$
    WITH RECURSIVE below AS (
        SELECT node_id AS id, false AS hit
        UNION ALL
        SELECT n.id, n.kind = 'generated' AND EXISTS (
                   SELECT 1 FROM calls c
                    WHERE c.id = n.call_id AND c.status = 'complete' AND (by_auxiliary OR c.kind <> 'auxiliary'))
          FROM below JOIN nodes n ON n.parent_id = below.id WHERE NOT below.hit)
    SELECT EXISTS (SELECT 1 FROM below WHERE hit)
$$;

-- One row a rollout: what it was, how it ended, what it cost.
CREATE VIEW rollout_summary AS
SELECT r.run_id, r.id AS rollout_id, s.index AS step, e.version AS evaluated_version, g.position, r.member,
       g.task, g.family, r.harness, r.state, r.outcome, r.reward, r.exclude_reason, r.advantage,
       c.calls, c.complete_calls, c.forks, c.prompt_tokens, c.cached_tokens, c.sampled_tokens,
       n.tree_tokens, n.oldest_version, n.newest_version, t.samples, t.targets,
       r.created_at, r.host, r.workspace, r.exit_code,
       EXTRACT(epoch FROM r.harness_started_at - r.created_at)::float8 AS waiting_s,
       EXTRACT(epoch FROM r.harness_ended_at - r.harness_started_at)::float8 AS harness_s,
       c.call_s, c.queue_s, c.prefill_s, c.decode_s,
       EXTRACT(epoch FROM r.scored_at - r.harness_ended_at)::float8 AS scoring_s,
       EXTRACT(epoch FROM r.settled_at - r.created_at)::float8 AS total_s
  FROM rollouts r
  JOIN groups g ON g.id = r.group_id
  LEFT JOIN steps s ON s.id = g.step_id
  LEFT JOIN evaluations e ON e.id = g.evaluation_id
 CROSS JOIN LATERAL (
       SELECT count(*) AS calls, count(*) FILTER (WHERE status = 'complete') AS complete_calls,
              count(*) FILTER (WHERE fork_reason <> 'root') AS forks,
              COALESCE(sum(prompt_tokens), 0) AS prompt_tokens, COALESCE(sum(cached_tokens), 0) AS cached_tokens,
              COALESCE(sum(completion_tokens), 0) AS sampled_tokens,
              COALESCE(sum(EXTRACT(epoch FROM ended_at - started_at)), 0)::float8 AS call_s,
              COALESCE(sum(EXTRACT(epoch FROM routed_at - started_at)), 0)::float8 AS queue_s,
              COALESCE(sum(EXTRACT(epoch FROM first_token_at - routed_at)), 0)::float8 AS prefill_s,
              COALESCE(sum(EXTRACT(epoch FROM ended_at - first_token_at)), 0)::float8 AS decode_s
         FROM calls WHERE calls.rollout_id = r.id) AS c
 CROSS JOIN LATERAL (
       SELECT COALESCE(sum(length), 0) AS tree_tokens,
              min((SELECT min((span ->> 0)::int) FROM jsonb_array_elements(version_spans) AS span)) AS oldest_version,
              max((SELECT max((span ->> 0)::int) FROM jsonb_array_elements(version_spans) AS span)) AS newest_version
         FROM nodes WHERE nodes.rollout_id = r.id) AS n
 CROSS JOIN LATERAL (
       SELECT count(*) AS samples, COALESCE(sum(n_targets), 0) AS targets
         FROM samples WHERE samples.rollout_id = r.id) AS t;

-- One row a branch: a path from a root to a leaf that a complete call generated. `rank` and `n_targets` are NULL for a
-- branch that is not trained. See its nodes with path_nodes(leaf_id), its ids with path_tokens(leaf_id).
CREATE VIEW branch AS
SELECT r.run_id, c.rollout_id, c.leaf_id, c.kind, c.seq AS last_call, p.nodes, p.n_tokens, p.n_generated,
       t.rank, t.n_targets, t.id AS sample_id
  FROM calls c
  JOIN rollouts r ON r.id = c.rollout_id
  LEFT JOIN samples t ON t.rollout_id = c.rollout_id AND t.leaf_id = c.leaf_id
 CROSS JOIN LATERAL (
       SELECT array_agg(id ORDER BY start) AS nodes, sum(length) AS n_tokens,
              COALESCE(sum(length) FILTER (WHERE kind = 'generated'), 0) AS n_generated
         FROM path_nodes(c.leaf_id)) AS p
 WHERE c.status = 'complete' AND c.leaf_id IS NOT NULL AND NOT gyre_continued(c.leaf_id, c.kind = 'auxiliary');

-- The fates of a sampled token, in order of precedence: gyre.trajectory.fate in SQL.
CREATE VIEW fate (name, meaning) AS VALUES
    ('evaluation', 'sampled for a held-out measurement'),
    ('auxiliary', 'of a call beside the work (a title, a topic check): never trained'),
    ('incomplete', 'of a call that the harness never got whole, one cut off by a time limit included'),
    ('open', 'its rollout runs, or is not handed out yet'),
    ('surplus', 'of a rollout that its group did without (rollouts.over_submit)'),
    ('excluded_evaluator', 'its rollout has no reward: scoring failed as often as it may'),
    ('excluded_infrastructure', 'its rollout has no reward: harness or host was lost'),
    ('too_few_valid', 'its group has fewer than two valid rewards'),
    ('no_variance', 'its group''s rewards are all equal'),
    ('low_variance', 'its group''s rewards differ by less than objective.min_std'),
    ('stale', 'its rollout has a token older than rollouts.max_staleness allows'),
    ('late', 'its call ended after its rollout was handed out'),
    ('not_kept', 'on branches beyond rollouts.branch_cap only'),
    ('queued', 'in a micro-batch that no trainer has finished'),
    ('rejected', 'taken out by objective.correction = ''mask'' as its micro-batch was trained'),
    ('trained', 'its term is in an accumulator or an optimizer step (also where the clip took its gradient)');

-- What became of every sampled token: one row a generated node, two where some of its tokens were rejected. Sum `tokens`
-- by `fate`. `why` is the exact reason of an exclusion.
CREATE VIEW token_accounting AS
SELECT run_id, step, evaluated_version, rollout_id, call_id, node_id, part.tokens, part.fate, why
  FROM (
       SELECT r.run_id, s.index AS step, e.version AS evaluated_version, r.id AS rollout_id, n.call_id, n.id AS node_id,
              n.length AS tokens, r.exclude_reason AS why,
              CASE WHEN owner.state IN ('held', 'done') THEN owner.rejected ELSE 0 END AS rejected,
              CASE WHEN g.evaluation_id IS NOT NULL THEN 'evaluation'
                   WHEN c.kind = 'auxiliary' THEN 'auxiliary'
                   WHEN c.status IS DISTINCT FROM 'complete' THEN 'incomplete'
                   WHEN r.state <> 'settled' THEN 'open'
                   WHEN r.outcome = 'surplus' THEN 'surplus'
                   WHEN r.exclude_reason IS NOT NULL AND r.outcome = 'evaluator' THEN 'excluded_evaluator'
                   WHEN r.exclude_reason IS NOT NULL THEN 'excluded_infrastructure'
                   WHEN g.outcome IS NULL AND r.handed_out_at IS NULL THEN 'open'
                   WHEN g.outcome <> 'trained' THEN g.outcome
                   WHEN r.drop_reason IS NOT NULL THEN r.drop_reason
                   WHEN owner.state IN ('held', 'done') THEN 'trained'
                   WHEN owner.sample_id IS NOT NULL THEN 'queued'
                   WHEN c.ended_at > r.handed_out_at THEN 'late'
                   ELSE 'not_kept' END AS fate
         FROM (SELECT id, rollout_id, call_id, length FROM nodes WHERE kind = 'generated'
               UNION ALL
               -- Tokens of a call that broke off before its node was written.
               SELECT NULL, rollout_id, id, completion_tokens FROM calls
                WHERE completion_tokens > 0
                  AND NOT EXISTS (SELECT 1 FROM nodes WHERE nodes.call_id = calls.id AND nodes.kind = 'generated')) AS n
         JOIN rollouts r ON r.id = n.rollout_id
         JOIN groups g ON g.id = r.group_id
         LEFT JOIN calls c ON c.id = n.call_id
         LEFT JOIN steps s ON s.id = g.step_id
         LEFT JOIN evaluations e ON e.id = g.evaluation_id
         LEFT JOIN LATERAL (
              SELECT samples.id AS sample_id, m.state,
                     COALESCE((m.metrics -> 'rejected_by_node' ->> n.id::text)::int, 0) AS rejected
                FROM samples LEFT JOIN micro_batches m ON m.id = samples.micro_batch_id
               WHERE samples.rollout_id = r.id AND n.id = ANY (samples.owned_nodes) LIMIT 1) AS owner ON true) AS whole
 CROSS JOIN LATERAL (
       SELECT whole.fate, whole.tokens - whole.rejected AS tokens WHERE whole.tokens > whole.rejected
       UNION ALL
       SELECT 'rejected', whole.rejected WHERE whole.rejected > 0) AS part;

-- How often the clip took a gradient away, by step and by the length of the sequence: `below` is a power of two that
-- the targets of its branch (its rollout, under objective.ratio = 'rollout') stay below.
CREATE VIEW clip_by_length AS
SELECT run_id, index AS step, key::int AS below, (value ->> 0)::bigint AS clipped, (value ->> 1)::bigint AS targets,
       (value ->> 0)::float8 / NULLIF((value ->> 1)::bigint, 0) AS clip_fraction
  FROM steps CROSS JOIN LATERAL jsonb_each(COALESCE(metrics -> 'clip_by_length', '{}'));

-- One row a step.
CREATE VIEW step_summary AS
SELECT s.run_id, s.id AS step_id, s.index AS step, s.state, s.min_version,
       g.groups, g.groups_trained, g.groups_no_variance, g.groups_low_variance, g.groups_too_few_valid,
       r.rollouts, r.settled, r.valid, r.excluded, r.surplus, r.stale, r.mean_reward, r.success, s.n_valid,
       c.calls, c.sampled_tokens, c.prompt_tokens, c.cached_tokens,
       m.micro_batches, m.micro_batches_waiting, m.tokens AS trained_tokens, m.targets AS trained_targets,
       m.branch_tokens,  -- of the trained samples one by one; trained_tokens are those computed: what they share, once
       m.train_attempts, m.logprob_diff, m.logprob_diff_max,
       (s.metrics ->> 'mismatch_kl')::float8 AS mismatch_kl, (s.metrics ->> 'mean_ratio')::float8 AS mean_ratio,
       (s.metrics ->> 'clip_fraction')::float8 AS clip_fraction,
       (s.metrics ->> 'rejected_fraction')::float8 AS rejected_fraction,
       s.started_at, s.rollouts_done_at, s.trained_at, s.published_at,
       EXTRACT(epoch FROM s.rollouts_done_at - s.started_at)::float8 AS rollouts_s,
       EXTRACT(epoch FROM s.trained_at - s.rollouts_done_at)::float8 AS training_after_rollouts_s,
       EXTRACT(epoch FROM s.published_at - s.trained_at)::float8 AS publishing_s,
       EXTRACT(epoch FROM COALESCE(s.published_at, s.trained_at) - s.started_at)::float8 AS total_s,
       s.metrics
  FROM steps s
 CROSS JOIN LATERAL (
       SELECT count(*) AS groups, count(*) FILTER (WHERE outcome = 'trained') AS groups_trained,
              count(*) FILTER (WHERE outcome = 'no_variance') AS groups_no_variance,
              count(*) FILTER (WHERE outcome = 'low_variance') AS groups_low_variance,
              count(*) FILTER (WHERE outcome = 'too_few_valid') AS groups_too_few_valid
         FROM groups WHERE groups.step_id = s.id) AS g
 CROSS JOIN LATERAL (
       SELECT count(*) AS rollouts, count(*) FILTER (WHERE x.state = 'settled') AS settled, count(x.reward) AS valid,
              count(x.exclude_reason) FILTER (WHERE x.outcome <> 'surplus') AS excluded,
              count(*) FILTER (WHERE x.outcome = 'surplus') AS surplus,
              count(*) FILTER (WHERE x.drop_reason = 'stale') AS stale,
              avg(x.reward) AS mean_reward,
              avg((x.reward >= 1)::int)::float8 AS success
         FROM rollouts x JOIN groups y ON y.id = x.group_id WHERE y.step_id = s.id) AS r
 CROSS JOIN LATERAL (
       SELECT count(*) AS calls, COALESCE(sum(completion_tokens), 0) AS sampled_tokens,
              COALESCE(sum(prompt_tokens), 0) AS prompt_tokens, COALESCE(sum(cached_tokens), 0) AS cached_tokens
         FROM calls JOIN rollouts x ON x.id = calls.rollout_id JOIN groups y ON y.id = x.group_id
        WHERE y.step_id = s.id) AS c
 CROSS JOIN LATERAL (
       SELECT count(*) AS micro_batches, count(*) FILTER (WHERE b.state IN ('queued', 'claimed')) AS micro_batches_waiting,
              COALESCE(sum(n_tokens) FILTER (WHERE b.state IN ('held', 'done')), 0) AS tokens,
              COALESCE(sum(n_targets) FILTER (WHERE b.state IN ('held', 'done')), 0) AS targets,
              COALESCE(sum((SELECT sum(n_tokens) FROM samples WHERE micro_batch_id = b.id))
                       FILTER (WHERE b.state IN ('held', 'done')), 0) AS branch_tokens,
              COALESCE(sum(attempts), 0) AS train_attempts,
              sum((b.metrics ->> 'mean_abs_logprob_diff')::float8 * n_targets)
                  / NULLIF(sum(n_targets) FILTER (WHERE b.metrics ? 'mean_abs_logprob_diff'), 0) AS logprob_diff,
              max((b.metrics ->> 'max_abs_logprob_diff')::float8) AS logprob_diff_max
         FROM micro_batches b WHERE b.step_id = s.id) AS m;

-- Where a cell's time went: one row for each step, cell and role, with the seconds that it spent in the role and those in
-- which it did the role's work. Work of `rollout` is a call that runs on the cell (one that moved counts on each of its
-- cells from end to end, since the times between are not stored), of `train` a micro-batch and, on
-- central, the optimizer step and the publication; a change (`to_train`, `to_rollout`) is work from end to end. A step's
-- time ends when its weights are published, or when the next step begins, so that no time counts twice.
CREATE VIEW cell_time AS
WITH run AS (SELECT id, started_at, COALESCE(ended_at, clock_timestamp()) AS ended_at FROM runs),
change AS (
    SELECT c.*, lead(c.started_at) OVER w AS next_at, lag(c.id) OVER w IS NULL AS is_first
      FROM role_changes c WINDOW w AS (PARTITION BY c.run_id, c.cell ORDER BY c.id)),
life AS (
    SELECT c.run_id, c.cell, c.from_role AS role, r.started_at AS began, c.started_at AS ended
      FROM change c JOIN run r ON r.id = c.run_id WHERE c.is_first
    UNION ALL
    SELECT c.run_id, c.cell, 'to_' || c.to_role, c.started_at, COALESCE(c.ended_at, c.next_at, r.ended_at)
      FROM change c JOIN run r ON r.id = c.run_id
    UNION ALL
    SELECT c.run_id, c.cell, c.to_role, c.ended_at, COALESCE(c.next_at, r.ended_at)
      FROM change c JOIN run r ON r.id = c.run_id WHERE c.ended_at IS NOT NULL
    UNION ALL
    SELECT k.run_id, k.name, 'rollout', r.started_at, r.ended_at FROM cells k JOIN run r ON r.id = k.run_id
     WHERE NOT EXISTS (SELECT 1 FROM role_changes c WHERE c.run_id = k.run_id AND c.cell = k.name)),
stretch AS (
    SELECT s.run_id, s.index AS step, s.started_at AS began,
           LEAST(lead(s.started_at) OVER (PARTITION BY s.run_id ORDER BY s.index),
                 COALESCE(s.published_at, s.trained_at, r.ended_at)) AS ended
      FROM steps s JOIN run r ON r.id = s.run_id),
work AS (
    SELECT run_id, cell, role, range_agg(tstzrange(began, ended)) AS at
      FROM (SELECT r.run_id, cell, 'rollout' AS role, c.routed_at AS began, c.ended_at AS ended
              FROM calls c JOIN rollouts r ON r.id = c.rollout_id CROSS JOIN unnest(c.cells) AS cell
            UNION ALL
            SELECT s.run_id, m.computed_by, 'train', m.claimed_at, m.computed_at
              FROM micro_batches m JOIN steps s ON s.id = m.step_id
            UNION ALL
            SELECT s.run_id, k.name, 'train',
                   GREATEST(s.rollouts_done_at, (SELECT max(computed_at) FROM micro_batches WHERE step_id = s.id)),
                   COALESCE(s.published_at, s.trained_at)
              FROM steps s JOIN cells k ON k.run_id = s.run_id AND k.central) AS done
     WHERE ended > began GROUP BY run_id, cell, role)
SELECT l.run_id, t.step, l.cell, l.role, sum(EXTRACT(epoch FROM p.ended - p.began))::float8 AS seconds,
       sum(CASE WHEN l.role LIKE 'to\_%' THEN EXTRACT(epoch FROM p.ended - p.began) ELSE COALESCE(busy.seconds, 0) END
          )::float8 AS busy_s
  FROM life l
  JOIN stretch t ON t.run_id = l.run_id AND t.began < l.ended AND t.ended > l.began
 CROSS JOIN LATERAL (SELECT GREATEST(l.began, t.began) AS began, LEAST(l.ended, t.ended) AS ended) AS p
  LEFT JOIN work w ON w.run_id = l.run_id AND w.cell = l.cell AND w.role = l.role
  LEFT JOIN LATERAL (
       SELECT sum(EXTRACT(epoch FROM upper(x) - lower(x))) AS seconds
         FROM unnest(w.at * tstzmultirange(tstzrange(p.began, p.ended))) AS x) AS busy ON true
 GROUP BY l.run_id, t.step, l.cell, l.role;

-- What changes of role cost: one row for each phase of each change, in order, and one named `all` for the whole. `engine_mb`
-- and `trainer_mb` are the memory of the cell's processes after the phase, `_freed_mb` how much less that is than before it
-- (of `all`: than before the change).
CREATE VIEW role_change_phase AS
WITH named AS (
    SELECT unnest(ARRAY['unroute', 'drain', 'kv', 'release', 'wake', 'load', 'push', 'sleep', 'resume', 'report']) AS phase,
           generate_series(1, 10) AS place),
phase AS (
    SELECT c.id, n.place, n.phase, (c.phases ->> n.phase)::float8 AS seconds, c.rss_mb -> n.phase AS after
      FROM role_changes c JOIN named n ON c.phases ? n.phase
     WHERE c.ended_at IS NOT NULL),
line AS (
    SELECT p.*, COALESCE(lag(p.after) OVER (PARTITION BY p.id ORDER BY p.place), c.rss_mb -> 'before') AS before
      FROM phase p JOIN role_changes c ON c.id = p.id
    UNION ALL
    SELECT c.id, 11, 'all', EXTRACT(epoch FROM c.ended_at - c.started_at)::float8, l.after, c.rss_mb -> 'before'
      FROM role_changes c
      LEFT JOIN LATERAL (SELECT after FROM phase WHERE id = c.id ORDER BY place DESC LIMIT 1) AS l ON true
     WHERE c.ended_at IS NOT NULL)
SELECT c.run_id, c.id AS change_id, c.cell, c.from_role, c.to_role, c.started_at, r.place, r.phase, r.seconds,
       (r.after ->> 'engine')::float8 AS engine_mb, (r.after ->> 'trainer')::float8 AS trainer_mb,
       (r.before ->> 'engine')::float8 - (r.after ->> 'engine')::float8 AS engine_freed_mb,
       (r.before ->> 'trainer')::float8 - (r.after ->> 'trainer')::float8 AS trainer_freed_mb
  FROM line r JOIN role_changes c ON c.id = r.id;
