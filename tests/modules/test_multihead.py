"""MultiheadBlockSparse compared with torch's module under the mask that equals its layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.modules.block_sparse import MultiheadBlockSparse
from longseq_bench.patterns.blocks import PATTERNS, WITH_SPECIAL
from longseq_bench.testing.definition import build_attention, count_pairs

EMBED, HEADS, BATCH, BLOCK = 32, 4, 3, 16

pytestmark = pytest.mark.usefixtures("one_thread")

causality = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])


def module(causal: bool = False, **options: Any) -> MultiheadBlockSparse:
    """Return a seeded module; its biases are not zero, so that a missing bias is noticed."""
    torch.manual_seed(0)
    all_options: dict[str, Any] = {"sparsity": 0.6, "block": BLOCK, "batch_first": True} | options
    sparse = MultiheadBlockSparse(EMBED, HEADS, causal=causal, **all_options)
    with torch.no_grad():
        for bias in (sparse.in_proj_bias, sparse.out_proj.bias):
            if bias is not None:
                bias.normal_()
    return sparse


def tokens(n: int, batch: int = BATCH, seed: int = 1) -> Tensor:
    return torch.randn(batch, n, EMBED, generator=torch.Generator().manual_seed(seed))


def visible_pairs(n: int, causal: bool, **options: Any) -> Tensor:
    """Return the visible pairs (batch x heads, N, N) of the implementation `block-sparse`."""
    w = Workload(seq_len=n, heads=HEADS, causal=causal)
    options = {"sparsity": 0.6, "block": BLOCK} | options
    return count_pairs(build_attention("block-sparse", options, w)).repeat(BATCH, 1, 1) > 0


def run_torch(
    like: MultiheadBlockSparse, x: tuple[Tensor, ...], visible: Tensor
) -> tuple[Tensor, nn.MultiheadAttention]:
    """Return the output of nn.MultiheadAttention with the same parameters, and the module."""
    own = nn.MultiheadAttention(EMBED, HEADS, bias=like.in_proj_bias is not None, batch_first=True)
    own.load_state_dict(like.state_dict())
    out, _ = own(*x, attn_mask=~visible, need_weights=False)
    return out, own


def assert_equals_torch(sparse: MultiheadBlockSparse, visible: Tensor) -> None:
    """Compare the output and the gradients of inputs and parameters."""
    n = visible.shape[-1]
    x = tuple(tokens(n, seed=s).requires_grad_() for s in range(3))
    y = tuple(t.detach().clone().requires_grad_() for t in x)
    out, weights = sparse(*x)
    expected, own = run_torch(sparse, y, visible)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    grad = tokens(n, seed=9)
    out.backward(grad)
    expected.backward(grad)
    for one, other in zip(x, y, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    got, want = ({name: p.grad for name, p in one.named_parameters()} for one in (sparse, own))
    assert got.keys() == want.keys()
    for name, expected_grad in want.items():
        error = float((got[name] - expected_grad).abs().max())
        assert error < 2e-5 * float(expected_grad.abs().max()), name


@causality
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_every_pattern_equals_torch_under_its_mask(pattern: str, causal: bool) -> None:
    options: dict[str, Any] = {"pattern": pattern, "seed": 3}
    if pattern in WITH_SPECIAL:
        options["globals"] = BLOCK
    visible = visible_pairs(150, causal, **options)
    assert float(visible.double().mean()) < (0.4 if causal else 0.6)
    assert_equals_torch(module(causal, **options), visible)


# ---- a drop-in ---------------------------------------------------------------------------------


def test_parameters_load_both_ways_and_start_equal() -> None:
    torch.manual_seed(5)
    own = nn.MultiheadAttention(EMBED, HEADS)
    torch.manual_seed(5)
    sparse = MultiheadBlockSparse(EMBED, HEADS)
    torch.testing.assert_close(sparse.state_dict(), own.state_dict(), rtol=0, atol=0)
    own.load_state_dict(module().state_dict())
    sparse.load_state_dict(own.state_dict())
    assert torch.equal(sparse.out_proj.bias, module().out_proj.bias)


def test_shapes_are_those_of_torch() -> None:
    sparse, x = module(), tokens(50)
    expected = sparse(x, x, x)[0]
    other = module(batch_first=False)
    assert not MultiheadBlockSparse(EMBED, HEADS).batch_first
    y = x.transpose(0, 1)
    out, weights = other(y, y, y)
    assert (out.shape, weights) == (y.shape, None)
    torch.testing.assert_close(out.transpose(0, 1), expected)


def test_grouped_heads_equal_heads_with_copied_keys() -> None:
    grouped, full, x = module(num_kv_heads=2), module(), tokens(50)

    def copied(rows: Tensor) -> Tensor:
        q, k, v = torch.split(rows, grouped._rows)
        sets = (t.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v))
        return torch.cat([q, *sets])

    state = grouped.state_dict()
    state |= {name: copied(state[name]) for name in ("in_proj_weight", "in_proj_bias")}
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(x, x, x)[0], full(x, x, x)[0])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torch_s_encoder_runs_this_module(mode: str) -> None:
    """In eval torch's fast path would run its dense kernel with our parameters."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 64, dropout=0.0, batch_first=True)
    layer.self_attn = module()
    layer.self_attn(*[tokens(20)] * 3)  # the encoder copies the layer, without its layouts
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    encoder.train(mode == "train")
    x = tokens(140)
    with torch.set_grad_enabled(mode == "train"):
        before = encoder(x)
        changed = x.clone()
        changed[:, 139] += 50
        after = encoder(changed)
    assert torch.isfinite(before).all()
    reached = (before != after).any(-1)
    visible = visible_pairs(140, False)[0]
    twice = (visible.double() @ visible.double())[:, 139] > 0
    assert torch.equal(reached[0], twice)
    assert not twice.all()


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout=0.1 is not supported"),
        ({"num_heads": 5}, "num_heads must divide embed_dim"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MultiheadBlockSparse(**{"embed_dim": EMBED, "num_heads": HEADS} | options)


X = tokens(20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"need_weights": True}, "attention weights are never computed"),
        ({"attn_mask": torch.zeros(20, 20)}, "the pattern is the mask"),
        ({"is_causal": True}, "created with causal=False"),
        ({"key": X[:, :9], "value": X[:, :9]}, "need one shape with E=32"),
        ({"key_padding_mask": torch.zeros(3, 20) > 0}, "all tokens are keys"),
    ],
)
def test_bad_input_says_what_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, UserError), match=message):
        module()(**{"query": X, "key": X, "value": X} | given)


def test_a_dtype_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype\n  Input should be 'float32', 'bfloat16'"):
        module().double()(*[X.double()] * 3)
