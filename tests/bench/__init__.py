"""Benchmarks: each a module that prints a table; none asserts a time."""
