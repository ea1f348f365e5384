"""Preloaded by the fork server of the tests: a trial measures its ceiling in milliseconds.

Most of a small trial's time goes into that measurement (worker/timing.py), and the tests
have hundreds of trials. What is measured is less precise, but the same; commands in processes of
their own measure it in full.
"""

from longseq_bench.worker import timing

timing.RATE_S, timing.CALLS, timing.TURNS = 0.0005, 2, 100
