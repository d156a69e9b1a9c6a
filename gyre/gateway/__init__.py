"""The HTTP front of the policy: any provider's wire format in, exact token ids to the engines and into Postgres.

Modules, in the order that a call meets them: `app` (routes, delivery) over `sharding`; the wire formats
(`anthropic_messages`, `openai_chat`, `openai_responses`) over `reading` and `bodies` (what came before is not read
again); `messages` (what every format becomes) and `dialect` (what a harness's calls say of themselves); `calls` (a call
from arrival to delivery) and `session` (what is held of a rollout); `conversation`, `tree` and `kinds` (which branch a
request extends, and of what kind); `policy` (messages to ids and back); `generation` over `routing`, `prompt_text` and
`engine` (one unbroken answer from whichever cells serve); `placing` and `nodes` (ids stored once); `recorder`
(Postgres); `metrics`. docs/gateway.md says how it behaves.
"""
