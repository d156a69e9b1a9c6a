"""The light harness: the loop of mini-swe-agent without its libraries.

    python3 -I -S light.py BASE_URL MODEL INSTRUCTION

Messages of OpenAI Chat with one tool, `bash`, until its output begins with the line that submits.
"""

import http.client
import json
import subprocess
import sys
from urllib.parse import urlsplit

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def main(base_url: str, model: str, instruction: str) -> None:
    url = urlsplit(base_url)
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You work with bash."},
        {"role": "user", "content": instruction},
    ]
    while True:
        gateway = http.client.HTTPConnection(url.hostname or "", url.port, timeout=7200)
        body = json.dumps({"model": model, "messages": messages, "tools": [BASH]})
        gateway.request("POST", f"{url.path}/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = gateway.getresponse()
        text = answer.read()
        gateway.close()
        if answer.status != 200:
            sys.exit(f"HTTP {answer.status}: {text[:500]!r}")
        message = json.loads(text)["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            output = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True).stdout
            if output.startswith(SUBMIT):
                return
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output.strip()})


if __name__ == "__main__":
    main(*sys.argv[1:])
