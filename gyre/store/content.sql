-- What rollouts hold: text, messages, tools, versions, rewards. Run after views.sql, which drops its views first.

DROP FUNCTION IF EXISTS node_text(bigint), path_text(bigint), gyre_text(bytea, text), gyre_utf8(bytea), gyre_said(jsonb);

-- UTF-8 to text; what is not UTF-8 becomes U+FFFD, one a broken sequence, as Python's errors="replace" has it.
-- Sampled tokens may end in the middle of a character.
CREATE FUNCTION gyre_utf8(data bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(data, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire THEN
    -- Bytes as characters U+0000..U+00FF, cut into runs of whole characters and single broken ones. Longest match wins.
    RETURN (
        WITH form AS (
            SELECT '[\u0001-\u007f]|[\u00c2-\u00df][\u0080-\u00bf]'
                   '|\u00e0[\u00a0-\u00bf][\u0080-\u00bf]|[\u00e1-\u00ec\u00ee\u00ef][\u0080-\u00bf]{2}'
                   '|\u00ed[\u0080-\u009f][\u0080-\u00bf]|\u00f0[\u0090-\u00bf][\u0080-\u00bf]{2}'
                   '|[\u00f1-\u00f3][\u0080-\u00bf]{3}|\u00f4[\u0080-\u008f][\u0080-\u00bf]{2}' AS whole,
                   '\u00e0[\u00a0-\u00bf]|[\u00e1-\u00ec\u00ee\u00ef][\u0080-\u00bf]|\u00ed[\u0080-\u009f]'
                   '|\u00f0[\u0090-\u00bf][\u0080-\u00bf]?|[\u00f1-\u00f3][\u0080-\u00bf]{1,2}'
                   '|\u00f4[\u0080-\u008f][\u0080-\u00bf]?|.' AS broken)
        SELECT string_agg(CASE WHEN part[1] ~ ('^(?:' || whole || ')+$')
                               THEN convert_from(convert_to(part[1], 'LATIN1'), 'UTF8') ELSE U&'\FFFD' END, '' ORDER BY i)
          FROM form
         CROSS JOIN LATERAL regexp_matches(convert_from(data, 'LATIN1'), '(?:' || whole || ')+|' || broken, 'g')
                            WITH ORDINALITY AS cut(part, i));
END $$;

-- Token ids as text, by the bytes of each token. NULL where the vocabulary is not known. An id that is not in it is
-- skipped, as tokenizers do; a NUL byte is shown as U+2400, since text has no room for it.
CREATE FUNCTION gyre_text(ids bytea, the_vocabulary text) RETURNS text LANGUAGE sql STABLE STRICT AS $$
    SELECT gyre_utf8(COALESCE(string_agg(p.piece, ''::bytea ORDER BY t.at), ''::bytea))
      FROM unnest(gyre_int32(ids)) WITH ORDINALITY AS t(id, at)
      LEFT JOIN token_pieces p ON p.vocabulary = the_vocabulary AND p.id = t.id
$$;

-- The text of one node, special tokens included.
CREATE FUNCTION node_text(node_id bigint) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT gyre_text(n.token_ids, u.vocabulary)
      FROM nodes n JOIN rollouts r ON r.id = n.rollout_id JOIN runs u ON u.id = r.run_id WHERE n.id = node_id
$$;

-- The text from the root to a leaf (or any other node): what the model read and wrote on that branch.
CREATE FUNCTION path_text(leaf_id bigint) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT gyre_text((SELECT string_agg(token_ids, ''::bytea ORDER BY start) FROM path_nodes(leaf_id)), u.vocabulary)
      FROM nodes n JOIN rollouts r ON r.id = n.rollout_id JOIN runs u ON u.id = r.run_id WHERE n.id = leaf_id
$$;

-- One row a span of sampled tokens: the policy version that sampled it, and where it lies (depth in tokens).
CREATE VIEW version_span AS
SELECT r.run_id, n.rollout_id, n.call_id, n.id AS node_id, (span ->> 0)::int AS version,
       n.start + (span ->> 1)::int AS start, (span ->> 2)::int - (span ->> 1)::int AS length
  FROM nodes n JOIN rollouts r ON r.id = n.rollout_id
 CROSS JOIN LATERAL jsonb_array_elements(n.version_spans) AS span;

-- One row a generated node that a sample owns: its tokens are targets of that branch and of no other. `branch` has the
-- sums.
CREATE VIEW owned_span AS
SELECT r.run_id, t.step_id, t.rollout_id, t.id AS sample_id, t.leaf_id, t.kind, t.rank, n.id AS node_id, n.call_id,
       n.start, n.length, t.advantage, t.micro_batch_id
  FROM samples t JOIN rollouts r ON r.id = t.rollout_id
 CROSS JOIN LATERAL unnest(t.owned_nodes) AS owned(node_id) JOIN nodes n ON n.id = owned.node_id;

-- What a message or a part of one says, whatever provider's form it has: strings, text parts, results of tools.
CREATE FUNCTION gyre_said(part jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN CASE jsonb_typeof(part)
        WHEN 'string' THEN part #>> '{}'
        WHEN 'array' THEN (SELECT string_agg(gyre_said(p), E'\n' ORDER BY i)
                             FROM jsonb_array_elements(part) WITH ORDINALITY AS parts(p, i))
        WHEN 'object' THEN COALESCE(part ->> 'text', gyre_said(part -> 'content'), gyre_said(part -> 'output'),
                                    gyre_said(part -> 'items'), part ->> 'instructions') END;
END $$;

-- One row a message that a harness sent, in the provider's own form (`raw`), and one an answer (role 'answer').
-- `position` counts from the beginning of the conversation; earlier messages are rows of earlier calls.
CREATE VIEW message AS
SELECT r.run_id, c.rollout_id, c.id AS call_id, c.seq, c.kind AS call_kind, m.position,
       CASE WHEN m.raw @> '{"content": [{"type": "tool_result"}]}' OR m.raw ->> 'type' LIKE '%call_output' THEN 'tool'
            WHEN m.raw ? 'instructions' THEN 'system'
            WHEN m.raw ? 'items' THEN 'assistant'
            ELSE COALESCE(m.raw ->> 'role', m.raw ->> 'type') END AS role,
       m.raw, gyre_said(m.raw) AS text
  FROM calls c JOIN rollouts r ON r.id = c.rollout_id
 CROSS JOIN LATERAL (
       SELECT COALESCE((c.request ->> 'base')::int, 0) + i::int - 1 AS position, raw
         FROM jsonb_array_elements(c.request -> 'messages') WITH ORDINALITY AS sent(raw, i)
       UNION ALL
       SELECT COALESCE((c.request ->> 'base')::int, 0) + COALESCE(jsonb_array_length(c.request -> 'messages'), 0),
              c.response || '{"role": "answer"}' WHERE c.response IS NOT NULL) AS m;

-- One row a tool call that the policy made. `arguments` is the text that it wrote, JSON or not.
CREATE VIEW tool_call AS
SELECT r.run_id, c.rollout_id, c.id AS call_id, c.seq, c.kind AS call_kind, i::int - 1 AS position,
       t ->> 'name' AS name, t ->> 'arguments' AS arguments, t ->> 'id' AS tool_call_id
  FROM calls c JOIN rollouts r ON r.id = c.rollout_id
 CROSS JOIN LATERAL jsonb_array_elements(c.response -> 'tool_calls') WITH ORDINALITY AS made(t, i);

-- One row a key of a rollout's reward file (and attempt at scoring); `reward` is what the run trains on.
CREATE VIEW reward AS
SELECT r.run_id, s.rollout_id, s.attempt, s.status, s.reward, e.key, (e.value #>> '{}')::float8 AS value
  FROM scores s JOIN rollouts r ON r.id = s.rollout_id
  LEFT JOIN LATERAL jsonb_each(s.detail -> 'rewards') AS e ON jsonb_typeof(e.value) = 'number';
