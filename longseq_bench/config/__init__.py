"""Configuration files: YAML to trials."""
