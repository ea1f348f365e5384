"""Reports of records, as files for people and for programs."""
