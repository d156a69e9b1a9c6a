"""A publisher in a process of its own: prints its ticket, then publishes as told on stdin.

Usage: python -m tests.transfer.publisher BACKEND MIB [HOST]. Every element of tensor `w<i>` is version + i. Commands, a
line each: `publish V`, `spin SECONDS` (publishes without end in the background, at random pauses up to SECONDS).
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

import torch

from gyre.transfer import open_publisher


def main() -> None:
    backend, mib = sys.argv[1], float(sys.argv[2])
    numel = int(mib * (1 << 20) / 4 / 3)
    params = {f"w{i}": torch.zeros(numel + i) for i in range(3)}
    publisher = open_publisher(params, backend, *sys.argv[3:])  # type: ignore[arg-type]

    def publish(version: int) -> None:
        for i in range(3):
            params[f"w{i}"].fill_(version + i)
        print(json.dumps(publisher.publish(version).to_json()), flush=True)

    def spin(pause: float) -> None:
        version = 1
        while True:
            for i in range(3):
                params[f"w{i}"].fill_(version + i)
            publisher.publish(version)
            version += 1
            time.sleep(random.uniform(0, pause))

    publish(0)
    for line in sys.stdin:
        what, argument = line.split()
        if what == "publish":
            publish(int(argument))
        else:
            threading.Thread(target=spin, args=(float(argument),), daemon=True).start()


if __name__ == "__main__":
    main()
