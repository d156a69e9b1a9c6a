"""The HTTP front of the policy: any provider's wire format in, exact token ids to the engines and into Postgres.

Modules: `app` (routes), `openai_chat` (one wire format), `messages` (what every wire format becomes), `policy`
(messages to ids and back), `tree` and `conversation` (which branch a request extends), `generation` over `routing` and
`engine` (one unbroken answer from whichever cells serve), `calls` (a call from arrival to delivery), `recorder`
(Postgres), `metrics`.
"""
