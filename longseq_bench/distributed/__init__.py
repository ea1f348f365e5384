"""Ranks: their groups, their shards, and the transfers between them."""
