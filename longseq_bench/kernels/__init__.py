"""Fast code, each piece beside its slow plain twin."""
