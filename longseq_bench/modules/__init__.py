"""nn.Module variants of block-sparse attention: a library that the benchmark does not use."""
