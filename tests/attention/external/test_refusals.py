"""What rows of other libraries can't compute is refused before a library is imported."""

from typing import Any

import pytest

from longseq_bench.attention.base import IMPLEMENTATIONS
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.distributed.group import Group
from longseq_bench.testing.contract import make_workload

pytestmark = pytest.mark.usefixtures("oldest_versions")

DECODE = {"mode": "decode", "seq_len": 96, "causal": True}
LATENT = DECODE | {"seq_len": 128, "latent": "512+64", "head_dim": None}
REFUSED: dict[str, list[tuple[int, dict[str, Any], dict[str, Any], str]]] = {
    "ring-attention-pytorch": [
        (1, {}, {}, "ring-attention-pytorch computes float32 only"),
        (3, {"dtype": "float32"}, {}, "64 tokens can't be split evenly into 3 parts"),
        (1, {"mask": "prefix:9"}, {}, "neither full nor causal|no mask prefix"),
        (2, {"dtype": "float32", "mode": "train"}, {}, "wrong gradients of k and v on several"),
    ],
    "flashinfer-decode": [
        (1, {}, {}, "it computes steps of decoding only; use mode=decode"),
        (1, DECODE, {"page": 40}, "page=40 does not divide the 96 cached tokens"),
        (1, DECODE | {"seq_len": 2**16, "head_dim": 2**16}, {}, r"fewer than 2\^32 / head_dim"),
        (1, DECODE | {"new_tokens": 2, "causal": False}, {}, "several new tokens are causal in"),
        (1, LATENT | {"latent": "512+64"}, {}, "latent 512[+]64/192: this attention can't"),
    ],
    "flash-mla-decode": [
        (1, DECODE, {}, "FlashMLA decodes with a latent of 512[+]64 and a multiple of 64 tokens"),
        (1, LATENT | {"latent": "512+32"}, {}, "FlashMLA decodes with a latent of 512[+]64"),
        (1, LATENT | {"seq_len": 96}, {}, "a multiple of 64 tokens only"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_library_has_not_is_refused(name: str) -> None:
    make = IMPLEMENTATIONS.get(name)
    for size, fields, options, words in REFUSED[name]:
        w = make_workload(**{"seq_len": 64, "dtype": "bfloat16", **fields})
        with pytest.raises((UnsupportedError, WorldError), match=words):
            make(w, Group(size - 1, size), **options)
