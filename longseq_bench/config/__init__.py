"""Configuration files: YAML to trials, and files of models."""
