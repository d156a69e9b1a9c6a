"""Real harnesses over the gateway and the scripted engine: run them, and prove of every call what was stored.

    run = await run_harness(world, scripted_engine, task)     # run_harness.py: the real binary, as gyre.harness says
    facts = check(run)                                        # invariants.py: raises AssertionError
    print(table([("30 turns", facts)]))                       # table.py: one line a run, for docs/harnesses.md

`recorder.py` is a reverse proxy between harness and gateway: what it saw is what the harness saw. `seen.py` and
`seen_*.py` read its bytes without any of Gyre's code.
"""
