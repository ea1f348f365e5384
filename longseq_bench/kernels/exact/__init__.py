"""Kernels of exact attention on one device, one a file; base.py has the contract."""
