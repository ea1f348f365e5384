"""The first screen of each kind of report: key figures, findings, one chart, one table."""
