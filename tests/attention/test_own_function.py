"""Own functions in a process: the contract of implementations, patterns, and what is compared."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longseq_bench.attention import own_function
from longseq_bench.attention.base import IMPLEMENTATIONS, Attention
from longseq_bench.attention.own_function import find_implementation
from longseq_bench.attention.own_source import find_file
from longseq_bench.core.errors import OwnFunctionError, UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.testing import ImplementationContract
from longseq_bench.testing.contract import assert_equals_reference, make_workload
from longseq_bench.testing.definition import make_inputs

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_attention.py"


class TestWindowOfTheDocs(ImplementationContract):
    cases = ((f"{EXAMPLE}:my_window", {"window": 3}), (f"{EXAMPLE}:my_window", {"window": 200}))


def build(folder: Path, text: str, tokens: int = 40, **fields: Any) -> Attention:
    """Return the function `f` of a file with this text, on one rank of a CPU, prepared."""
    path = folder / "own.py"
    path.write_text(text)
    w = Workload(seq_len=tokens, heads=4, head_dim=8, **fields)
    attention = find_implementation(f"{path}:f")(w, Group.alone())
    attention.prepare("cpu")
    return attention


def test_a_function_may_take_sinks(tmp_path: Path) -> None:
    """It has their gradient too; without a sink in the workload it gets None."""
    text = (
        "import torch\ndef f(q, k, v, sinks=None):\n"
        "    scores = q @ k.mT / q.shape[-1]**0.5\n"
        "    if sinks is not None:\n"
        "        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)\n"
        "        scores = torch.cat([scores, column], -1)\n"
        "    return scores.softmax(-1)[..., :k.shape[2]] @ v\n"
    )
    path = tmp_path / "own.py"
    path.write_text(text)
    for sink in (True, False):
        assert_equals_reference(f"{path}:f", {}, make_workload(40, mode="train", sink=sink))
    with pytest.raises(UnsupportedError, match="f takes no argument `sinks`, needed for a sink in"):
        build(tmp_path, "def f(q, k, v): return q\n", sink=True)


def test_a_function_is_given_what_it_names(tmp_path: Path) -> None:
    text = (
        "seen = {}\n"
        "def f(q, k, v, is_causal, *, grouped_heads, scale, rank, world_size, group, soft_cap,\n"
        "      n=3, x=[1]):\n"
        "    seen.update(locals())\n    return q\n"
    )
    attention = build(tmp_path, text, causal=True, kv_heads=2, soft_cap=5.0)
    q, k, v = make_inputs(attention.workload)
    attention(q, k, v)
    function: Any = type(attention).function  # type: ignore[attr-defined]
    seen = function.__globals__["seen"]
    assert {n: value for n, value in seen.items() if n not in "qkv"} == {
        "is_causal": True, "grouped_heads": True, "scale": 8**-0.5, "rank": 0, "world_size": 1,
        "group": None, "soft_cap": 5.0, "n": 3, "x": [1],
    }  # fmt: skip
    assert all(seen[n] is t for n, t in zip("qkv", (q, k, v), strict=True))


@pytest.mark.parametrize(
    ("fields", "ranks", "kind", "reason"),
    [
        ({"causal": True}, 1, UnsupportedError, "`causal`, needed for a causal mask"),
        ({"kv_heads": 2}, 1, UnsupportedError, "`enable_gqa`, needed for fewer kv_heads"),
        ({"mask": "documents:4"}, 1, UnsupportedError, "`attn_mask`, needed for a mask"),
        ({}, 2, WorldError, "`group`, needed for several ranks"),
    ],
)
def test_what_it_has_no_parameter_for_is_refused_before_it_runs(
    tmp_path: Path, fields: dict[str, Any], ranks: int, kind: type[Exception], reason: str
) -> None:
    (tmp_path / "own.py").write_text("def f(q, k, v):\n    raise RuntimeError('it ran')\n")
    make = find_implementation(f"{tmp_path}/own.py:f")
    with pytest.raises(kind, match=f"f takes no argument {reason}"):
        make(Workload(seq_len=8, heads=4, **fields), Group(0, ranks))


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("q.transpose(1, 2)", "float32 (1, 40, 4, 8) on cpu"),
        ("q.double()", "float64 (1, 4, 40, 8) on cpu"),
        ("(q, None)", "a tuple"),
    ],
)
def test_another_result_is_an_error_with_what_was_expected(
    tmp_path: Path, body: str, got: str
) -> None:
    attention = build(tmp_path, f"\ndef f(q, k, v):\n    return {body}\n")
    with pytest.raises(OwnFunctionError) as raised:
        attention(*make_inputs(attention.workload))
    assert str(raised.value) == (
        f"f returned {got}; expected float32 (1, 4, 40, 8) on cpu, like q (batch, heads, tokens, "
        f"head_dim) ({tmp_path}/own.py:2)"
    )


def test_another_file_than_the_expected_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f(q, k, v): pass\n")
    name, before = f"{path}:f", find_file(f"{path}:f").source
    assert find_implementation(name, before).summary == "f"
    path.write_text("def f(q, k, v): return v\n")
    with pytest.raises(OwnFunctionError, match=f"expected {before}.*same file on every host"):
        find_implementation(name, before)
    path.unlink()
    with pytest.raises(OwnFunctionError, match="No such file"):
        find_implementation(name, before)


def test_a_file_may_import_its_neighbours_and_define_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_own.py").write_text("TIMES = 2\n")
    text = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nfrom neighbour_of_own import TIMES\n"
        "@dataclass\nclass Times:\n    n: int\n"
        "def f(q, k, v):\n    return Times(TIMES).n * q\n"
    )
    attention = build(tmp_path, text)
    q, k, v = make_inputs(attention.workload)
    assert torch.equal(attention(q, k, v), 2 * q)


# ---- patterns ----------------------------------------------------------------------------------

WINDOW = "def f(q, k, v, *, causal, reach=2):\n    return q\n"


def visible(attention: Attention, head: int = 0) -> Any:
    at = np.arange(6)
    return np.asarray(attention.multiplicity(at, at, head)).astype(int)


def test_without_a_pattern_it_is_exact(tmp_path: Path) -> None:
    attention = build(tmp_path, WINDOW, causal=True)
    assert attention.is_exact
    assert np.array_equal(visible(attention), np.tri(6))
    assert "density_achieved" not in attention.measures()


@pytest.mark.parametrize("owner", ["", "f.pattern = pattern\ndel pattern\n"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_pattern_is_given_options_and_the_mask_applies_too(
    tmp_path: Path, owner: str, causal: bool
) -> None:
    text = WINDOW + (
        "def pattern(i, j, head, *, reach):\n"
        "    return 3 * (abs(i[:, None] - j[None, :]) <= reach + head)\n"
    )
    attention = build(tmp_path, text + owner, causal=causal)
    assert not attention.is_exact
    at = np.arange(6)
    expected = 3 * (abs(at[:, None] - at) <= 3)
    assert np.array_equal(visible(attention, head=1), expected * np.tri(6) if causal else expected)


def test_a_function_may_decline_the_pattern_of_its_module(tmp_path: Path) -> None:
    text = WINDOW + "def pattern(i, j, head): return None\nf.pattern = None\n"
    assert build(tmp_path, text).is_exact


@pytest.mark.parametrize(
    ("body", "got"),
    [("j > 0", "bool (6,)"), ("(i[:, None] > j) / 2", "float64 (6, 6)"), ("None", "object ()")],
)
def test_another_result_of_a_pattern_is_an_error(tmp_path: Path, body: str, got: str) -> None:
    attention = build(tmp_path, WINDOW + f"def pattern(i, j, head): return {body}\n")
    with pytest.raises(OwnFunctionError, match=re.escape(f"pattern of f returned {got}; expected")):
        visible(attention)


@pytest.mark.parametrize("causal", [False, True])
def test_the_density_of_a_long_pattern_is_that_of_some_rows(
    tmp_path: Path, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = WINDOW + "def pattern(i, j, head): return abs(i[:, None] - j[None, :]) <= 10\n"
    whole = build(tmp_path, text, tokens=2000, causal=causal).measures()["density_achieved"]
    monkeypatch.setattr(own_function, "COUNTED_PAIRS", 100 * 2000 * 4)
    attention = build(tmp_path, text, tokens=2000, causal=causal)
    assert attention.facts()["density_of"] == "100 of 2000 query rows"
    assert attention.measures()["density_achieved"] == pytest.approx(whole, rel=0.02)
    assert attention.cost().flops == pytest.approx(
        whole * IMPLEMENTATIONS.get("dense")(attention.workload, Group.alone()).cost().flops,
        rel=0.02,
    )


# ---- masks -------------------------------------------------------------------------------------

MASKED = """
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
"""


@pytest.mark.parametrize("mask", ["sliding-window:30", "documents:40", "prefix:50"])
@pytest.mark.parametrize("function", ["by_tensor", "by_function", "near"])
def test_a_mask_reaches_the_function(tmp_path: Path, function: str, mask: str) -> None:
    (tmp_path / "own.py").write_text(MASKED)
    w = make_workload(131, mode="train", mask=mask)
    assert_equals_reference(f"{tmp_path}/own.py:{function}", {}, w)


def test_a_plain_mask_is_no_tensor(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MASKED)
    w = make_workload(131, mode="train", causal=True)
    assert_equals_reference(f"{tmp_path}/own.py:by_tensor", {}, w)
