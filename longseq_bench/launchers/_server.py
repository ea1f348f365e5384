"""Preloaded into the fork server alone: what a trial leaves behind becomes the server's child.

A process that a trial started and that outlives it would otherwise be adopted by init, where
nobody can tell it from any other.
"""

import ctypes
import sys
import warnings

PR_SET_CHILD_SUBREAPER = 36

if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

# an adopted process that ends is news to the fork server, and nothing to warn about
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
