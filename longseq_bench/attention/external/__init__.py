"""Attention of other libraries; none of them is imported before it runs.

_library.py finds out if a library is installed in a version that is supported.
"""
