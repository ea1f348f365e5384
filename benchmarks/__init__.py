"""Benchmarks: programs that print a figure next to the one that it is compared with."""
