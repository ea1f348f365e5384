"""Patterns: index arithmetic in numpy that says which query sees which key."""
