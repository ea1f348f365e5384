"""nn.Module variants of block-sparse attention: a library, apart from the benchmark."""
