"""Meters of memory and clocks."""
