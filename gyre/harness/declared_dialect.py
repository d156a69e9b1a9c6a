"""The dialect of a harness that only the run file knows: `[harness.dialect]`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace

from gyre.config.run import DialectConfig, KindRule
from gyre.gateway.dialect import Hint
from gyre.gateway.messages import Message, Request, difference


class DeclaredDialect:
    """What `[harness.dialect]` says; what it does not say, the shape of the tree decides."""

    name = "command"

    def __init__(self, config: DialectConfig) -> None:
        self._config = config
        self._strip = [re.compile(pattern) for pattern in config.strip_system]

    def normalise(self, request: Request) -> Request:
        if not self._strip:
            return request
        return replace(request, messages=tuple(self._stripped(m) for m in request.messages))

    def _stripped(self, message: Message) -> Message:
        if message.role != "system":
            return message
        text = message.content
        for pattern in self._strip:
            text = pattern.sub("", text)
        return message if text == message.content else replace(message, content=text)

    def hint(self, headers: Mapping[str, str], request: Request) -> Hint:
        agent = headers.get(self._config.agent_header.lower(), "") if self._config.agent_header else ""
        kind = next((rule.kind for rule in self._config.kinds if _fits(rule, headers, request)), None)
        return Hint(kind, agent)

    def difference(self, emitted: Message, echoed: Message) -> str | None:
        return difference(emitted, echoed)


def _fits(rule: KindRule, headers: Mapping[str, str], request: Request) -> bool:
    if rule.tools is not None and rule.tools != bool(request.tools):
        return False
    if rule.header is not None:
        value = headers.get(rule.header.lower())
        if value is None or (rule.matches is not None and not re.search(rule.matches, value)):
            return False
    if rule.system is not None:
        first = request.messages[0]
        if first.role != "system" or not re.search(rule.system, first.content):
            return False
    if rule.last is None:
        return True
    new = itertools.takewhile(lambda m: m.role != "assistant", reversed(request.messages))
    return any(re.search(rule.last, m.content) for m in new)
