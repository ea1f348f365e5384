"""The Python API: what `longseq_bench` exports, and what the command line calls."""
