"""Meters, one per file. `meters/base.py` is the contract and says how to add one."""
