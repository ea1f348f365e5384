"""Attention of other libraries; none of them is imported before it runs."""
