"""A step of decoding over ranks that hold parts of a cache: nothing goes round the ring."""

from typing import Any

import numpy as np
from typing_extensions import override

from longseq_bench.attention import cache
from longseq_bench.attention.cache import CacheAttention, choose_kernel, seen_keys
from longseq_bench.attention.exact.ring import Ring
from longseq_bench.core.cost import mask_pairs
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.distributed.shard import Shard
from longseq_bench.kernels.base import AttentionKernel
from longseq_bench.kernels.exact.base import AUTO
from longseq_bench.patterns.visible_keys import visible_keys


class DecodeRing(Ring):
    """All new tokens on every rank, against its part of the cache."""

    @override
    def refuse(self, w: Workload, group: Group) -> None:
        defaults = {"chunk": None, "queries": "partitioned", "transport": "p2p"}
        for name, default in (defaults | {"wire": None, "offload": "none"}).items():
            if (value := getattr(self, name)) != default:
                option = "wire_dtype" if name == "wire" else name
                raise UnsupportedError(
                    f"{option}={value} has no meaning with mode decode: every rank has the new "
                    "tokens, and no key is sent"
                )

    @override
    def build_shard(self) -> Shard:
        keys = self.order.positions(self.group.rank)
        self._seen = seen_keys(visible_keys(self.workload), np.asarray(self.workload.queries), keys)
        return Shard.of_tokens(self.workload, np.asarray(self.workload.queries), keys)

    def prepare(self, device: str) -> None:
        """Choose the kernel of a step of decoding."""
        self.device, w = device, self.workload
        kernel, self._kernel_facts = choose_kernel(self.exact_name or AUTO, self.kernel_use, w)
        self._kernel = CacheAttention(kernel, [self._seen], self.group)

    def build_kernel(self) -> AttentionKernel:
        """Return attention to the cache of all ranks."""
        return self._kernel

    @override
    def work_share(self) -> float:
        return int((self._seen.stop - self._seen.first).sum()) / mask_pairs(self.workload)

    @override
    def bytes_sent(self) -> int:
        return cache.bytes_sent(self.workload, self.group.size)

    @override
    def facts(self) -> dict[str, Any]:
        return self._kernel_facts
