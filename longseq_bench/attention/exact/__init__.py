"""Exact attention implementations."""
