"""Fast kernels, and a slow, simple reference of each."""
