"""Report sections, one question a file."""
