#!/bin/sh
# A sweep in four shards, each on one GPU of this host, by GNU parallel. `--workers auto` does
# the same in one run with one progress display.
parallel -j 4 'CUDA_VISIBLE_DEVICES=$(({%} - 1)) longseq sweep sweep.yaml --out out --shard {}/4' ::: 1 2 3 4
