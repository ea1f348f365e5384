"""Imported by the fork server after everything else."""

import gc
import sys
from contextlib import suppress

from longseq_bench.core.gpus import load_cudnn
from longseq_bench.launchers import _server_preload

# Triton reads all its files in each process that compiles a kernel, and the first call of cuDNN
# loads its libraries in 0.5 to 0.9 s: once here, for all trials
with suppress(Exception):
    if sys.modules["torch"].version.cuda:
        from triton.runtime.cache import triton_key

        triton_key()
        load_cudnn()

# a trial's own search for garbage would write to, and so copy, the pages of what is imported
gc.freeze()
gc.enable()

_server_preload.outlive_thread()
