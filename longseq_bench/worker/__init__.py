"""The child process: everything that touches a device. `trial.py` is the life of one trial."""
