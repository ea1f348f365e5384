"""Sparse attention implementations."""
