"""MultiheadBlockSparse compared with torch's module under the mask that equals its layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longseq_bench.core.errors import UnsupportedError, UserError
from longseq_bench.core.model import Workload
from longseq_bench.modules.factory import MultiheadBlockSparse
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
    """Return the visible pairs (N, N) of the implementation `block-sparse`."""
    w = Workload(seq_len=n, heads=1, causal=causal)
    options = {"sparsity": 0.6, "block": BLOCK} | options
    return count_pairs(build_attention("block-sparse", options, w))[0] > 0


@causality
@pytest.mark.parametrize("n", [17, 150])
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_every_pattern_equals_torch_under_its_mask(pattern: str, n: int, causal: bool) -> None:
    """The output and the gradients of inputs and parameters."""
    options: dict[str, Any] = {"pattern": pattern, "seed": 3}
    if pattern in WITH_SPECIAL:
        options["globals"] = BLOCK
    sparse, visible = module(causal, **options), visible_pairs(n, causal, **options)
    assert n == 17 or float(visible.double().mean()) < (0.4 if causal else 0.6)
    own = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    own.load_state_dict(sparse.state_dict())
    results = []
    for attend, mask in ((sparse, {}), (own, {"attn_mask": ~visible, "need_weights": False})):
        x = [tokens(n, seed=s).requires_grad_() for s in range(3)]
        out, weights = attend(*x, **mask)
        assert weights is None
        out.backward(tokens(n, seed=9))
        gradients = {name: p.grad for name, p in attend.named_parameters()}
        results.append(
            {"out": out.detach(), **gradients, **{str(i): t.grad for i, t in enumerate(x)}}
        )
    got, expected = results
    assert got.keys() == expected.keys()
    for name, of_torch in expected.items():
        assert (got[name] - of_torch).abs().max() < 2e-5 * of_torch.abs().max().clamp_min(1), name


# ---- a drop-in ---------------------------------------------------------------------------------


def test_parameters_load_both_ways_and_start_equal() -> None:
    torch.manual_seed(5)
    own = nn.MultiheadAttention(EMBED, HEADS)
    torch.manual_seed(5)
    sparse = MultiheadBlockSparse(EMBED, HEADS)
    assert sparse.state_dict().keys() == own.state_dict().keys()
    for name, value in own.state_dict().items():
        assert torch.equal(sparse.state_dict()[name], value), name
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
    torch.testing.assert_close(sparse(x[1], x[1], x[1])[0], expected[1])


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
    visible = visible_pairs(140, False)
    twice = (visible.double() @ visible.double())[:, 139] > 0
    assert torch.equal((before != after).any(-1)[0], twice)
    assert not twice.all()
    assert "kernel" in encoder.layers[0].self_attn.attend.attention.facts()


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout=0.1 is not supported"),
        ({"num_heads": 5}, "num_heads must divide embed_dim"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
        ({"sparsity": 1.0}, "sparsity 1 is outside"),
        ({"globals": 16}, "globals=16 is not supported by pattern=local-window"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MultiheadBlockSparse(**{"embed_dim": EMBED, "num_heads": HEADS} | options)


X = tokens(20)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"need_weights": True}, UnsupportedError, "attention weights are never computed"),
        ({"attn_mask": torch.zeros(20, 20)}, UnsupportedError, "the pattern is the mask"),
        ({"is_causal": True}, UnsupportedError, "created with causal=False"),
        ({"key": X[:, :9], "value": X[:, :9]}, UserError, "need one shape with E=32"),
        ({"key_padding_mask": torch.zeros(3, 20) > 0}, UnsupportedError, "rows of one length"),
    ],
)
def test_bad_input_says_what_is_wrong(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        module()(**{"query": X, "key": X, "value": X} | given)


def test_a_dtype_without_a_kernel_is_refused() -> None:
    y = X.double()
    with pytest.raises(UserError, match="dtype float64: Input should be 'float32', 'bfloat16'"):
        module().double()(y, y, y)
