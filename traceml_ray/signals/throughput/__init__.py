"""Throughput of a run: samples, tokens and FLOPs per second, and when it will be over."""
