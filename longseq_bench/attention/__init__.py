"""Attention implementations, one a file; see base.py for the contract."""
