"""Report formats: one Document in, files out."""
