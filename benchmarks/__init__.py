"""Measurements, each against the naive way or a peer in the same process. `make bench` runs them all."""
