"""Imported by the fork server after everything else."""

import gc

from longseq_bench.launchers import _server_preload

# a trial's own search for garbage would write to, and so copy, the pages of what is imported
gc.freeze()
gc.enable()

_server_preload.outlive_thread()
