"""A policy that follows a script, inside a real SGLang server: what any test of a real harness needs.

    async def test_something(scripted_world, scripted_engine):
        world = await scripted_world(harness={"name": "mini-swe-agent"}, context=65_536)
        task = scripted_engine.script([
            {"think": "First look.", "text": "Looking.", "tools": [{"name": "bash", "input": {"command": "ls"}}]},
            {"tools": [{"name": "bash", "input": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}]},
        ])                                     # a marker like "SCRIPT@s12x0": put it into the task's text
        ... run the harness with base URL f"{world.served.url}/r/{world.tokens[0]}/v1" and a task f"{task} Do it." ...
        assert prove(world, [scripted_engine]) == 2       # tests/scripted/proof.py: stored ids = ids got and given

`world` is the `World` of tests/gateway/conftest.py (its engine is cell c0).
The tokenizer is a real byte-level BPE (8,192 tokens, trained on standard library text), the renderer `qwen3`.

**How it answers.** The model reads the whole prompt back from the KV cache (keys hold token ids), so radix caching,
chunked prefill, batches, re-routes and resumed prompts all have to be right for it to answer at all. The script is the
first `SCRIPT@id` in a user message (tool results do not count), so a sub-agent follows a script of its own when the
tool call that starts it has another marker in its prompt. The step is found from the history: each answer's text begins
with `(step N)`; answers without (`"mark": false`) are counted on from the last one with it.

**A script**: `script(steps, rules=[…], side=step, final=step, summary=text)`. A step is a dict:

- `think`: reasoning (`<think>` block); `words`: sampled words after it (3): these have real log-probs, the rest have 0.
- `text`: content. `mark`: False leaves `(step N)` out of it.
- `tools`: `[{"name": …, "input": {…}}, …]`, several in parallel. Anywhere in `input`, `{"$find": regex}` stands for the
  last match (its group) in what users and tools said, `{"$findall": regex}` for the list of all matches.
- `raw`: text instead of all that (special tokens included), for malformed tool calls …; `ids`: ids to append.
- `stop`: False: words without end, until max_tokens. `token_s`: seconds a token (the whole batch waits).
- `canonical`: True: the ids that the tokenizer gives. By default the text is cut at odd places and encoded piece by
  piece, so that almost no answer survives being tokenised again.
- `tries`: a list of steps, one for each time that this step is begun (a resample gets the next; the last one stays).
  For harnesses that drop an answer or ask again. An engine counts for itself, so not for tests that move calls.

`rules`: `[{"last": regex, "tools": True | False, "reply": step}]`, first match wins over the steps; `last` is
searched in everything after the last answer. Requests for a summary (compaction) of the shipped harnesses are answered
with one that names the script and the step, so that the work goes on after it, and ends with the text `summary`.
`side`: the answer where the prompt offers no tools but the script has some (titles). `final`: the answer after the last
step ("All done.").

`ScriptedEngine(folder, policy, scripts, name)` makes further engines; share `scripts` with the first one.
"""
