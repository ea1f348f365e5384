"""Implementations that split the batch over devices or ranks."""
