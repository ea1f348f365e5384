"""The GPU acceptance command: checks and measurements that only a machine with a GPU can make.

command.py runs steps item by item by items.py, which keeps each result as JSON, so that the next
call continues. There is one module per step: smoke.py, correct.py, kernels.py, speed.py, decode.py,
longest.py, faults.py and ranks.py. tiles.py runs in a process of its own, so that this one holds no
memory on the device and survives an illegal access.
"""
