"""HTTP clients of tests, for servers of this machine.

None reads certificates: that takes long, in the one loop that client, gateway and engine of a test share. And none
gives a connection up after the usual five seconds: on a busy machine a loop may be away for longer.
"""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai

PATIENT_S = 600.0
LOCAL: dict[str, Any] = {"verify": False, "trust_env": False, "timeout": PATIENT_S}


def http_client(base_url: str = "", **options: Any) -> httpx.AsyncClient:
    """For plain requests."""
    return httpx.AsyncClient(base_url=base_url, **{**LOCAL, **options})


def openai_client(base_url: str, api_key: str = "none", *, max_retries: int = 0, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's own, which asks once if it is not told otherwise."""
    http = openai.DefaultAsyncHttpxClient(**LOCAL)
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=max_retries, http_client=http, **options)


def anthropic_client(base_url: str, *, max_retries: int = 0, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's own, which asks once if it is not told otherwise."""
    http = anthropic.DefaultAsyncHttpxClient(**LOCAL)
    return anthropic.AsyncAnthropic(base_url=base_url, max_retries=max_retries, http_client=http, **options)
