"""Benchmarks: programs that print a figure beside what it is compared with."""
