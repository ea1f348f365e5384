"""Campaigns of random and hostile input, run by hand; the suite runs a short seed of each."""
