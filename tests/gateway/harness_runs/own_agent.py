"""A harness that nobody knows: argv, a settings file in its home, the official client, and headers of its own."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import openai

settings = json.loads(Path.home().joinpath(".config/own-agent.json").read_text())
client = openai.OpenAI(base_url=settings["url"], api_key=settings["key"], timeout=7200)
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Run a command", "parameters": SCHEMA}
DELEGATE = {**BASH, "name": "delegate", "description": "Give a task to another agent"}


def shell(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + f"\n[exit {done.returncode}]"


def sub_agent(task: str, name: str) -> str:
    """By Responses, not streamed."""
    items: list = [{"role": "user", "content": task}]
    tools = [{"type": "function", **BASH}]
    while True:
        answer = client.responses.create(
            model=settings["model"], instructions="You help.", input=items, tools=tools, store=False,
            extra_headers={"X-Own-Agent": name},
        )  # fmt: skip
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            output = shell(json.loads(call.arguments)["command"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def system() -> dict:
    return {"role": "system", "content": f"You are an agent. It is {datetime.datetime.now().isoformat()}. Use tools."}


def ask(messages: list, tools: list, **more: object) -> dict:
    with client.chat.completions.stream(
        model=settings["model"], messages=[system(), *messages], stream_options={"include_usage": True},
        **({"tools": [{"type": "function", "function": tool} for tool in tools]} if tools else {}), **more,
    ) as stream:  # fmt: skip
        message = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
    return {k: v for k, v in message.items() if k in ("role", "content", "tool_calls", "reasoning_content")}


def main(task: str) -> None:
    ask([{"role": "user", "content": f"Give a title to: {task}"}], [])
    messages: list = [{"role": "user", "content": task}]
    for turn in range(200):
        answer = ask(messages, [BASH, DELEGATE])
        messages.append(answer)
        if not answer.get("tool_calls"):
            print(answer["content"])
            return
        for i, call in enumerate(answer["tool_calls"]):
            command = json.loads(call["function"]["arguments"])["command"]
            work = sub_agent if call["function"]["name"] == "delegate" else lambda c, _: shell(c)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": work(command, f"sub-{turn}-{i}")})
        if len(messages) > settings["most"]:
            wish = {"role": "user", "content": "CONTEXT CHECKPOINT COMPACTION: write down what to remember."}
            summary = ask([*messages, wish], [BASH, DELEGATE])
            messages = [{"role": "user", "content": f"Go on from here. {summary['content']}"}]


main(sys.argv[1])
