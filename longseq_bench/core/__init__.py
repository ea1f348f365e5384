"""Data, errors, units, options and formulas that both sides of the process boundary use."""
