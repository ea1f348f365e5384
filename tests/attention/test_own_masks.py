"""Own functions under a mask: they get it as a tensor or as a function, or are refused."""

from pathlib import Path

import pytest

from longseq_bench.attention.own_function import find_implementation
from longseq_bench.core.errors import UnsupportedError
from longseq_bench.distributed.group import Group
from longseq_bench.testing.contract import assert_equals_reference, make_workload

SOURCE = """
import torch
from torch.nn.functional import scaled_dot_product_attention

def by_tensor(q, k, v, *, attn_mask, causal):
    return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=causal)

def by_function(q, k, v, *, mask_mod):
    n = torch.arange(q.shape[2])
    visible = mask_mod(None, None, n[:, None], n[None, :])
    return scaled_dot_product_attention(q, k, v, attn_mask=visible)

def near(q, k, v, *, attn_mask):
    n = torch.arange(q.shape[2])
    near = (n[:, None] - n[None, :]).abs() < 20
    return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask & near)

near.pattern = lambda q, k, head: abs(q[:, None] - k[None, :]) < 20

def without(q, k, v, *, causal):
    return scaled_dot_product_attention(q, k, v, is_causal=causal)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("mask", ["sliding-window:30", "documents:40", "prefix:50"])
@pytest.mark.parametrize("function", ["by_tensor", "by_function", "near"])
def test_a_mask_reaches_the_function(file: Path, function: str, mask: str) -> None:
    w = make_workload(131, mode="train", mask=mask)
    assert_equals_reference(f"{file}:{function}", {}, w)


def test_a_plain_mask_is_no_tensor(file: Path) -> None:
    w = make_workload(131, mode="train", causal=True)
    assert_equals_reference(f"{file}:by_tensor", {}, w)


def test_a_function_without_the_parameter_is_refused(file: Path) -> None:
    w = make_workload(131, mask="documents:40")
    with pytest.raises(UnsupportedError, match="without takes no argument `attn_mask`, needed for"):
        find_implementation(f"{file}:without")(w, Group.alone())
