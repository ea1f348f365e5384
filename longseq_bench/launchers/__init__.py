"""Launchers turn a trial into processes. `launchers/base.py` is the contract and how to add one."""
