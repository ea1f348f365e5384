"""How long a sequence an attention can really take on given hardware, and how fast."""

__version__ = "0.1.0"
