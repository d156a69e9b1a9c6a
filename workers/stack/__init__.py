"""The local stack: one supervisor that starts, watches, restarts and ends every process of Gyre on this machine.

`python -m workers.stack --data DIR [--run-config FILE]` is the supervisor; `gyre up` and `gyre train` start it.
"""
