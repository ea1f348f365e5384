"""Meters, one a file: each says why it can't measure here before it says what it saw."""
