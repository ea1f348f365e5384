"""Ranks: who they are, and what travels between them."""
