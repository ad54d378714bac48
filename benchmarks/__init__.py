"""Benchmarks: each script prints what it measured and writes it as data, with command, machine and versions."""
