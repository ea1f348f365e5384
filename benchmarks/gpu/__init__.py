"""The GPU acceptance command: checks and measurements that only a machine with a GPU can make.

items.py runs a step item by item and keeps each result as JSON, so that the next call continues.
There is one module per step: smoke.py, correct.py, kernels.py, speed.py, longest.py, faults.py and
ranks.py. measure.py and tiles.py run in processes of their own, so that this one holds no memory
on the device and survives an illegal access.
"""
