"""How fast weights come over, by each backend, against a raw socket. `python -m benchmarks.transfer`."""
