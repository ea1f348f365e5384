"""Preloaded by the fork server of the tests: a trial measures its ceiling in milliseconds.

Most of a small trial's time goes into that measurement (worker/device_rates.py), and the tests
have hundreds of trials. What is measured is less precise, but the same; commands in processes of
their own measure it in full.
"""

from longseq_bench.worker import device_rates

device_rates.LONG_S, device_rates.CALLS, device_rates.TURNS = 0.0005, 2, 100
