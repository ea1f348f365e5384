"""The contract of an implementation as a class of tests."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from longseq_bench.attention.base import Attention
from longseq_bench.core.cost import floor_bytes, visible_pairs
from longseq_bench.core.errors import UnsupportedError, WorldError
from longseq_bench.core.model import Workload
from longseq_bench.distributed.group import Group
from longseq_bench.testing.definition import (
    Options,
    Tensors,
    build_attention,
    compute_reference,
    count_pairs,
    find_kind,
    make_inputs,
    make_output_gradient,
    relative_error,
)
from longseq_bench.worker.check import PARAMETERS, TOLERANCE, check
from longseq_bench.worker.checked_rows import FULL_CHECK_TOKENS
from longseq_bench.worker.passes import draw_inputs

HEADS, HEAD_DIM, BATCH = 4, 16, 2

both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
both_groupings = pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2], ids=["mha", "gqa"])


def make_workload(seq_len: int, **fields: Any) -> Workload:
    """Return a small workload: batch 2, 4 heads, head_dim 16, unless `fields` says otherwise."""
    sizes = {"batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM}
    return Workload(seq_len=seq_len, **{**sizes, **fields})


def build_case(
    implementation: str | type[Attention], options: Options, seq_len: int, **fields: Any
) -> tuple[Attention, Tensors]:
    """Return an implementation on a small workload, and inputs for it."""
    w = make_workload(seq_len, **fields)
    return build_attention(implementation, options, w), make_inputs(w)


def assert_equals_reference(
    implementation: str | type[Attention], options: Options, w: Workload
) -> None:
    """Compare the output, and in train the gradients, with the definition and with `check`.

    `check` decides whether `longseq` reports a speed.
    """
    attention, qkv = build_attention(implementation, options, w), make_inputs(w)
    out = attention(*qkv)
    assert out.dtype == qkv[0].dtype
    assert out.shape == (*qkv[0].shape[:3], w.v_head_dim)
    matrices = attention.projections()
    if attention.sinks is not None:
        matrices |= {"sink": attention.sinks}
    expected = dict(compute_reference(count_pairs(attention), w, matrices))
    allowed = TOLERANCE[attention.coarsest_dtype]
    assert relative_error(out.detach(), expected.pop("out")) < allowed
    rows = torch.arange(w.queries.start, w.seq_len)
    if not w.train:
        assert check(attention, qkv, out, rows).over_tolerance(w.dtype) is None
        return
    grad_out = make_output_gradient(w)
    torch.autograd.backward(out, grad_out)
    grads = [t.grad for t in (*qkv, *matrices.values()) if t.grad is not None]
    assert len(grads) == len(expected)
    # the gradients of q and k of one token alone are rounding errors; a matrix sums over all rows
    errors = {
        n: relative_error(g, x, 0.3 if n.startswith("W") else 0.1)
        for (n, x), g in zip(expected.items(), grads, strict=True)
    }
    assert max(errors.values()) < allowed, errors
    if w.seq_len > FULL_CHECK_TOKENS:
        return  # here `check` samples rows and needs an output gradient of zero in all others
    errors_of = check(attention, qkv, out, rows, grad_out, (grads[0], grads[1], grads[2]))
    assert errors_of.over_tolerance(w.dtype) is None
    assert errors_of.largest.keys() == {"out", "dq", "dk", "dv"} | {PARAMETERS[n] for n in matrices}


class ImplementationContract:
    """Tests that every implementation passes; a subclass lists its cases.

    cases: pairs of an implementation (a registered name or a class) and options. Every test runs
    on each. Override a test to skip it with a reason, and `expected_density` for a pattern whose
    density is a share of something else than token pairs.
    """

    cases: ClassVar[Sequence[tuple[str | type[Attention], Options]]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test on every case."""
        if "implementation" in metafunc.fixturenames:
            names = [kind if isinstance(kind, str) else kind.__name__ for kind, _ in self.cases]
            ids = [
                "-".join([name, *map(str, options.values())])
                for name, (_, options) in zip(names, self.cases, strict=True)
            ]
            metafunc.parametrize(("implementation", "options"), self.cases, ids=ids)

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Use one thread: with small tensors, threads mostly wait for each other."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def expected_density(
        self, implementation: str | type[Attention], options: Options, pairs: Tensor, causal: bool
    ) -> float:
        """Return the share of visible pairs that are computed; pairs: (Hq, N, N)."""
        return float(pairs.sum()) / (len(pairs) * visible_pairs(pairs.shape[-1], causal))

    @both_masks
    @both_groupings
    @pytest.mark.parametrize("tokens", [1, 127])
    def test_output_and_gradients_equal_the_reference(
        self, implementation: Any, options: Options, causal: bool, kv_heads: int, tokens: int
    ) -> None:
        """Every mask, both groupings, and lengths below one tile."""
        w = make_workload(tokens, causal=causal, kv_heads=kv_heads, mode="train")
        assert_equals_reference(implementation, options, w)

    @both_masks
    @pytest.mark.parametrize("v_head_dim", [8, 24], ids=["narrow-v", "wide-v"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_v_head_dim_of_its_own_equals_the_reference_or_is_refused(
        self, implementation: Any, options: Options, causal: bool, v_head_dim: int, dtype: str
    ) -> None:
        """It is refused before anything runs; the reason names both sizes."""
        w = make_workload(
            150, causal=causal, kv_heads=2, mode="train", v_head_dim=v_head_dim, dtype=dtype
        )
        if not find_kind(implementation).takes_v_head_dim:
            with pytest.raises(UnsupportedError, match=f"v_head_dim {v_head_dim} is unlike"):
                build_attention(implementation, options, w)
            return
        if v_head_dim > HEAD_DIM:
            try:
                build_attention(implementation, options, w)
            except UnsupportedError as refused:
                pytest.skip(str(refused))
        assert_equals_reference(implementation, options, w)
        forward = w.model_copy(update={"mode": "forward"})
        assert_equals_reference(implementation, options, forward)

    @both_masks
    @pytest.mark.parametrize("new_tokens", [1, 3])
    def test_a_step_of_decoding_equals_the_reference_or_is_refused(
        self, implementation: Any, options: Options, causal: bool, new_tokens: int
    ) -> None:
        """New tokens against a cache, with full and grouped heads; its cost is that of a step."""
        kind = find_kind(implementation)
        for kv_heads, dtype in ((HEADS, "float32"), (HEADS // 2, "bfloat16")):
            shape = {"kv_heads": kv_heads, "dtype": dtype, "new_tokens": new_tokens}
            w = make_workload(150, causal=causal, mode="decode", **shape)
            if not kind.takes_decode:
                with pytest.raises(UnsupportedError, match=r"mode decode|new_tokens"):
                    build_attention(implementation, options, w)
                continue
            try:
                attention = build_attention(implementation, options, w)
            except UnsupportedError as refused:
                pytest.skip(str(refused))
            assert_equals_reference(implementation, options, w)
            pairs, cost = count_pairs(attention), attention.cost()
            assert cost.flops == pytest.approx(4 * HEAD_DIM * BATCH * float(pairs.sum()))
            assert cost.floor_bytes == 2 * BATCH * kv_heads * 150 * HEAD_DIM * w.dtype_bytes
            if kind.takes_kv_dtype:
                w, rows = w.model_copy(update={"kv_dtype": "int8"}), torch.tensor([*w.queries])
                try:
                    attention = build_attention(implementation, options, w)
                except UnsupportedError:
                    continue  # with these options
                inputs = draw_inputs(attention, "cpu", 0, rows).inputs
                found = check(attention, inputs, attention(*inputs), rows)
                assert found.over_tolerance(w.dtype) is None

    @pytest.mark.parametrize("part", [{"sink": True}, {"soft_cap": 0.7}], ids=["sink", "cap"])
    def test_sinks_and_a_soft_cap_are_right_or_refused(
        self, implementation: Any, options: Options, part: dict[str, Any]
    ) -> None:
        """The output and all gradients, also that of the sinks; many scores are above the cap."""
        w = make_workload(150, causal=True, kv_heads=2, mode="train", **part)
        try:
            assert_equals_reference(implementation, options, w)
        except UnsupportedError as refused:
            pytest.skip(str(refused))

    def test_longer_than_a_tile(self, implementation: Any, options: Options) -> None:
        """Several tiles, the last one short, with three heads on one KV head."""
        sizes = {"heads": 3, "kv_heads": 1, "head_dim": 8, "batch": 1}
        w = make_workload(1025, causal=True, mode="train", **sizes)
        assert_equals_reference(implementation, options, w)

    @both_masks
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_equals_the_reference(
        self, implementation: Any, options: Options, causal: bool, dtype: str
    ) -> None:
        """Within the tolerance of the dtype."""
        w = make_workload(150, causal=causal, kv_heads=2, mode="train", dtype=dtype)
        assert_equals_reference(implementation, options, w)

    @both_masks
    def test_forward_equals_the_reference(
        self, implementation: Any, options: Options, causal: bool
    ) -> None:
        """Forward keeps no log-sum-exp and may use other code."""
        w = make_workload(129, causal=causal, kv_heads=2)
        assert_equals_reference(implementation, options, w)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("moved", [(1, 2), (2, 3)], ids=["heads", "head_dim"])
    def test_strides_change_no_result(
        self, implementation: Any, options: Options, moved: tuple[int, int], dtype: str
    ) -> None:
        """q, k, v and the gradient of the output may have another order in memory."""
        shape = {"causal": True, "kv_heads": 2, "mode": "train", "dtype": dtype}
        try:
            attention, qkv = build_case(implementation, options, 131, **shape)
        except UnsupportedError as refused:  # the dtype
            pytest.skip(str(refused))
        given, results = [*qkv, make_output_gradient(attention.workload)], []
        strided = [t.detach().transpose(*moved).contiguous().transpose(*moved) for t in given]
        for *inputs, grad_out in (given, strided):
            leaves = [t.detach().requires_grad_() for t in inputs]
            out = attention(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out)])
        for expected, got in zip(*results, strict=True):
            assert relative_error(got, expected, 0.1) < TOLERANCE[attention.coarsest_dtype]

    @both_masks
    def test_constant_values_come_back(
        self, implementation: Any, options: Options, causal: bool
    ) -> None:
        """Fault 2: a sum of one softmax per block would return a multiple of v."""
        shape = {"causal": causal, "kv_heads": 2}
        attention, (q, k, v) = build_case(implementation, options, 300, **shape)
        generator = torch.Generator().manual_seed(2)
        row = torch.randn(v.shape[0], v.shape[1], 1, v.shape[3], generator=generator)
        constant = row.expand_as(v).contiguous()
        out = attention(q, k, constant)
        sees_any = count_pairs(attention).sum(-1) > 0
        for matrix in [m for n, m in attention.projections().items() if n in ("v", "out")]:
            constant = constant @ matrix.detach()
        expected = constant.repeat_interleave(2, 1) * sees_any[None, :, :, None]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=3e-6)

    def test_the_future_never_reaches_the_past(self, implementation: Any, options: Options) -> None:
        """Fault 3. Bit for bit: an approximate test would hide a small leak."""
        attention, qkv = build_case(implementation, options, 300, causal=True, kv_heads=2)
        before = attention(*qkv)
        for token in (1, 150, 299):
            changed = make_inputs(attention.workload)
            for tensor in changed:
                tensor[:, :, token:] = 30 * torch.randn_like(tensor[:, :, token:])
            after = attention(*changed)
            assert torch.equal(after[:, :, :token], before[:, :, :token])
            assert not torch.equal(after[:, :, token:], before[:, :, token:])

    @both_masks
    def test_a_token_moves_the_rows_that_see_it_and_no_others(
        self, implementation: Any, options: Options, causal: bool
    ) -> None:
        """Fault 1: attention over heads would change other rows. Both batches, every head."""
        attention, qkv = build_case(implementation, options, 300, causal=causal, kv_heads=2)
        before, pairs = attention(*qkv), count_pairs(attention)
        for token in (0, 130, 299):
            q, k, v = make_inputs(attention.workload)
            v[:, :, token] += 100
            moved = (attention(q, k, v) != before).any(-1)
            assert torch.equal(moved, (pairs[:, :, token] > 0).expand_as(moved))

    @both_masks
    @pytest.mark.parametrize("v_head_dim", [HEAD_DIM, HEAD_DIM // 2])
    @pytest.mark.parametrize("mode", ["forward", "train"])
    def test_cost_is_that_of_the_pairs_seen(
        self, implementation: Any, options: Options, causal: bool, mode: str, v_head_dim: int
    ) -> None:
        """Scores, dq and dk have D terms or elements; the output, dv and dp have v_head_dim."""
        shape = {"causal": causal, "kv_heads": 2, "mode": mode, "v_head_dim": v_head_dim}
        try:
            attention, qkv = build_case(implementation, options, 111, **shape)
        except UnsupportedError:
            pytest.skip("it does not take a v_head_dim of its own")
        attention(*qkv)  # a pattern that depends on the inputs exists only after a call
        w, cost = attention.workload, attention.cost()
        terms = 4 * HEAD_DIM + 3 * v_head_dim if w.train else HEAD_DIM + v_head_dim
        flops = 2 * terms * float(count_pairs(attention).sum()) * BATCH
        elements = BATCH * 111 * (HEADS + 2) * (HEAD_DIM + v_head_dim)
        if attention.projections():
            flops += 2 * HEAD_DIM * elements * (3 if w.train else 1)
        assert cost.flops == pytest.approx(flops, rel=1e-12)
        log_sum_exp = 4 * BATCH * HEADS * 111
        assert cost.floor_bytes == (8 * elements + log_sum_exp if w.train else 4 * elements)
        assert cost.floor_bytes == floor_bytes(w)
        assert cost.bytes_sent == 0

    @both_masks
    def test_shares_equal_enumeration(
        self, implementation: Any, options: Options, causal: bool
    ) -> None:
        """Faults 7 and 9: achieved density and uncovered tokens are those of the pattern."""
        attention, qkv = build_case(implementation, options, 300, causal=causal, kv_heads=2)
        out = attention(*qkv)
        pairs, shares = count_pairs(attention), attention.measures()
        if "uncovered" in shares:
            zero = (out == 0).all(-1).double().mean()
            assert shares["uncovered"] == pytest.approx(float(zero), abs=1e-12)
            assert shares["uncovered"] == pytest.approx(float((pairs.sum(-1) == 0).double().mean()))
        else:
            assert (pairs.sum(-1) > 0).all()
        if "density_achieved" in shares:
            density = self.expected_density(implementation, options, pairs, causal)
            assert shares["density_achieved"] == pytest.approx(density)

    @both_masks
    def test_what_may_be_seen_is_that_of_the_pattern(
        self, implementation: Any, options: Options, causal: bool
    ) -> None:
        """`keys_seen` forgets no key, heads of one pattern see the same, and queries themselves."""
        attention, qkv = build_case(implementation, options, 300, causal=causal, kv_heads=2)
        attention(*qkv)
        pairs, tokens, some = count_pairs(attention), np.arange(300), np.array([0, 130, 299])
        first = {attention.pattern_of(head): head for head in reversed(range(len(pairs)))}
        for head, count in enumerate(pairs):
            assert torch.equal(count, pairs[first[attention.pattern_of(head)]])
            seen = attention.keys_seen(some, head)
            if seen is not None:
                assert (np.diff(seen) > 0).all()
                hidden = torch.from_numpy(np.setdiff1d(tokens, seen))
                assert not count[torch.from_numpy(some)][:, hidden].any()
            if attention.sees_itself:
                assert ((count.diagonal() > 0) == (count.sum(1) > 0)).all()

    @pytest.mark.parametrize("world_size", [2, 3, 4, 8])
    def test_several_ranks_are_accepted_or_refused(
        self, implementation: Any, options: Options, world_size: int
    ) -> None:
        """An implementation for one rank raises WorldError; it never gives one rank's answer."""
        kind = find_kind(implementation)
        w = make_workload(1024, batch=8, heads=24)
        if kind.many_ranks:
            assert kind(w, Group(world_size - 1, world_size)).group.size == world_size
            return
        with pytest.raises(WorldError, match=str(world_size)):
            kind(w, Group(world_size - 1, world_size))
