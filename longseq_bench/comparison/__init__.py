"""Compare two sets of records: match trials, test differences, build the document."""
