"""torch's kernel of exact attention for a CPU, for tests of code that calls any kernel."""

import torch

from longseq_bench.kernels.exact.base import Use, select

EXACT = select("aten-flash-cpu", Use("cpu", torch.float32, 16, True))[0]
