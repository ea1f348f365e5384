"""Imported by the fork server after everything else."""

import gc
from contextlib import suppress

import torch

from longseq_bench.launchers import _server_preload

if torch.version.cuda:
    # Triton reads all its files in each process that compiles a kernel: once here, for all trials
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()

# a trial's own search for garbage would write to, and so copy, the pages of what is imported
gc.freeze()
gc.enable()

_server_preload.outlive_thread()
