"""Short labels: unique, at most 40 characters, with what differs only; baselines by label."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longseq_bench.analysis.labels import find_baseline_label, find_short_labels
from longseq_bench.attention.signature_options import specs_of
from longseq_bench.attention.sparse.block_sparse import BlockSparse, BlockSparseMultihead
from longseq_bench.core.model import Trial
from longseq_bench.core.options import fill
from tests import make


def labels(*settings: tuple[str, dict[str, Any]], **fields: Any) -> list[str]:
    return find_short_labels([make.trial(name, options=o, **fields) for name, o in settings])


def blocks(pattern: str, sparsity: float, **more: Any) -> tuple[str, dict[str, Any]]:
    return "block-sparse", {"pattern": pattern, "sparsity": sparsity, "globals": None, **more}


def test_a_label_has_what_differs_in_words() -> None:
    assert labels(("ring", {"chunk": 1024, "order": "zigzag"}), ("sdpa", {"chunk": 1})) == [
        "ring", "sdpa",
    ]  # fmt: skip
    ring = {"chunk": 1024, "order": "zigzag", "queries": "full", "wire_dtype": None}
    other = {"chunk": 96, "order": "striped", "queries": "full", "wire_dtype": "bfloat16"}
    assert labels(("ring", ring), ("ring", ring | {"order": "striped"})) == [
        "ring zigzag", "ring striped",
    ]  # fmt: skip
    assert labels(("ring", ring), ("ring", ring | {"chunk": 96})) == [
        "ring chunk 1k",
        "ring chunk 96",
    ]
    assert labels(("ring", ring), ("ring", other)) == [
        "ring chunk 1k zigzag", "ring chunk 96 striped bf16 wire",
    ]  # fmt: skip
    assert labels(("d", {"sequence_parallel": True}), ("d", {"sequence_parallel": False})) == [
        "d sequence parallel", "d no sequence parallel",
    ]  # fmt: skip


def test_an_own_function_has_its_name_and_what_tells_it_apart() -> None:
    def own(*named: tuple[str, str]) -> list[str]:
        return find_short_labels([make.trial(name, source=source) for name, source in named])

    a, b = "a" * 16, "b" * 16
    assert own(("x/mine.py:f", a)) == ["f"]
    assert own(("x/mine.py:f", a), ("x/other.py:f", b)) == ["mine.py:f", "other.py:f"]
    # before and after an edit
    assert own(("x/mine.py:f", a), ("x/mine.py:f", b)) == ["f file aaaaaaaa", "f file bbbbbbbb"]


def test_a_pattern_stands_for_the_only_implementation_with_patterns() -> None:
    several = blocks("local-window", 0.95), blocks("strided", 0.999)
    assert labels(*several) == ["local-window 95 %", "strided 99.9 %"]
    # sparsity is always stated, because it changes what is computed
    assert labels(blocks("strided", 0.9)) == ["block-sparse 90 %"]
    assert (
        labels(*several, blocks("strided", 0.999, globals=128))[2] == "strided 99.9 % globals 128"
    )
    module = "block-sparse-multihead", several[1][1]
    second = "block-sparse-multihead", several[0][1]
    assert labels(*several, module, second)[::2] == [
        "block-sparse local-window 95 %", "block-sparse-multihead strided 99.9 %",
    ]  # fmt: skip
    assert labels(*several, ("strided", {}))[0] == "block-sparse local-window 95 %"


@pytest.mark.parametrize("make_kind", [BlockSparse, BlockSparseMultihead])
def test_a_window_is_stated_instead_of_the_sparsity_that_it_replaces(make_kind: type) -> None:
    def label(**given: Any) -> str:
        return labels(("sparse", fill(specs_of(make_kind), given, "sparse")))[0]

    assert label(window="4096") == "sparse window 4k"
    # there both count
    assert label(window="4096", pattern="strided") == label() == "sparse 90 %"


def test_segments_are_in_k_and_rates_that_double_are_not_named() -> None:
    long, rates = (4096, 8192), ((1, 2), (2, 2))
    segmented = [("dilated", {"segments": long, "dilation": rate}) for rate in rates]
    segmented.append(("dilated", {"segments": (32768,), "dilation": (1,)}))
    assert labels(*segmented) == ["dilated 4k,8k", "dilated 4k,8k dilation 2,2", "dilated 32k"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fit_only": True}, "fit only"),
        ({"keep": "inputs", "mode": "train"}, "recomputed"),
        ({"keep": "nothing"}, "in place"),
        ({"allocator": "expandable"}, "expandable segments"),
        ({"allocator": "fresh"}, "fresh memory"),
        ({"timing": "cold"}, "cold"),
        ({"timing": "graph"}, "graph"),
        ({"dense_kernel": "sdpa"}, "against sdpa"),
        ({"options": {"offload": "q"}}, "offloaded"),
    ],
)
def test_settings_other_than_options_are_in_brackets(fields: dict[str, Any], words: str) -> None:
    assert find_short_labels([make.trial("ring", **fields)]) == [f"ring ({words})"]


VALUES = st.sampled_from(
    [0, 1, 1.0, True, False, "1", "1.0", "none", "", None, (1,), (1, 2), (), 1024, 0.5, "x" * 50]
)
OPTIONS = st.dictionaries(
    st.sampled_from(["pattern", "sparsity", "segments", "dilation", "chunk", "order", "offload"]),
    VALUES,
)
TRIALS = st.builds(
    lambda name, options, ranks, fit, keep, dense: make.trial(
        name, options=options, world_size=ranks, fit_only=fit, keep=keep, dense_kernel=dense
    ),
    st.sampled_from(["ring", "block-sparse", "x" * 60, "x" * 59 + "y", "1"]),
    OPTIONS,
    st.sampled_from([1, 2, 1024]),
    st.booleans(),
    st.sampled_from(["all", "inputs", "nothing"]),
    st.sampled_from(["same", "sdpa", "aten-flash-cpu"]),
)


def distinct_key(trial: Trial) -> tuple[Any, ...]:
    options = sorted(
        (name, type(value).__name__, repr(value))
        for name, value in trial.options.items()
        if value not in (None, "none")
    )
    return trial.implementation, tuple(options), trial.fit_only, trial.keep, trial.dense_kernel


@given(st.lists(TRIALS, max_size=12))
def test_labels_are_unique_per_settings_and_short(trials: list[Trial]) -> None:
    found = find_short_labels(trials)
    by_label: dict[str, set[Any]] = {}
    by_key: dict[Any, set[str]] = {}
    for trial, label in zip(trials, found, strict=True):
        by_label.setdefault(label, set()).add(distinct_key(trial))
        by_key.setdefault(distinct_key(trial), set()).add(label)
        mark = f" ×{trial.world_size}" if trial.world_size > 1 else ""
        assert len(label + mark) <= 40, label
        assert ("fit only" in label) == trial.fit_only
        assert not {"None", "null"} & set(label.split())
    assert all(len(same) == 1 for same in (*by_label.values(), *by_key.values()))


# ---- baselines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["ring chunk 2k", "ring chunk=2048", "ring chunk=2048 w=null"])
def test_a_baseline_is_a_label_or_has_its_options(baseline: str) -> None:
    trials = [make.trial("ring", options={"chunk": c, "w": None}) for c in (1024, 2048)]
    trials.append(make.trial("ring", options={"chunk": 2048, "w": None}, fit_only=True))
    assert find_baseline_label(trials, find_short_labels(trials), baseline) == "ring chunk 2k"


def test_a_long_label_is_a_number() -> None:
    kept = [blocks(pattern, 0.99987654, window=w) for pattern in ("a" * 24, "b") for w in (1, 2)]
    assert labels(*kept)[:2] == ["block-sparse #1", "block-sparse #2"]
    assert labels(("ring", {"order": ""}), ("ring", {})) == ["ring #1", "ring #2"]
    # off, and not yet there when the records were made, are the same
    assert labels(("ring", {"offload": "none"}), ("ring", {"chunk": None})) == ["ring", "ring"]
