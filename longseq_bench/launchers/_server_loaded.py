"""Imported by the fork server after everything else."""

from longseq_bench.launchers import _server_preload

_server_preload.outlive_thread()
