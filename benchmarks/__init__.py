"""Benchmarks: each script prints what it measured and writes it as data, with the command, machine and versions that made it."""
