"""Preloaded by the fork server of the tests: a trial measures its ceiling in milliseconds.

Most of a small trial's time goes into that measurement (worker/matmul_rate.py), and the tests
have hundreds of trials. What is measured is less precise, but the same; commands in processes of
their own measure it in full.
"""

from longseq_bench.worker import matmul_rate

matmul_rate.LONG_S, matmul_rate.PRODUCTS, matmul_rate.TURNS = 0.0005, 2, 100
