"""Benchmarks. Each prints a table and one JSON line, and appends its record to results/."""
