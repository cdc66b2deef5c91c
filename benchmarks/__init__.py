"""Benchmarks: each prints a table and one JSON line, and keeps its rows in results/."""
