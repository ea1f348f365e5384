"""The short form of `tests.worker.faults`: every sixth kind of fault, the dtypes in turn."""

from itertools import cycle
from typing import Any

import pytest

from longseq_bench.launchers.local import LocalLauncher
from tests.trials import complete, run_trial
from tests.worker.faults import DTYPES, STAGES, Case, cases, is_right, run_case

KINDS = [kind for kinds in STAGES.values() for kind in kinds]
HARD = ["no maximum subtracted", "scores clipped at 20", "scores scaled by 1.01",
        "output scaled by 1.005", "dk scaled by 1.05", "one row on the last rank",
        "keys of other ranks not seen", "queries and keys in eight bits"]  # fmt: skip
CHOSEN = [
    next(iter(cases([kind], [dtype], [ranks])), None)
    for kind, dtype, ranks in zip(KINDS[::6], cycle(DTYPES), cycle([1, 1, 2]), strict=False)
] + [Case(kind, "bfloat16", 2 if "rank" in kind else 1) for kind in HARD]
NOT_COMPUTED = [Case("looked up by the inputs' bytes", "float16", 1),
                Case("looked up on disk", "float32", 2),
                Case("computed when it is read", "bfloat16", 2),
                Case("layout chosen once", "bfloat16", 1),
                Case("list of the next KV head", "float16", 1),
                Case("scale of the neighbouring block", "bfloat16", 2),
                Case("a clock that runs slowly", "float32", 1)]  # fmt: skip


@pytest.mark.parametrize("case", [*filter(None, CHOSEN), *NOT_COMPUTED], ids=str)
def test_it_is_wrong(launcher: LocalLauncher, case: Case) -> None:
    """Or, if its results might be looked up, none of them is."""
    assert is_right(case, run_case(launcher, case))


RING = {"heads": 6, "kv_heads": 3, "head_dim": 4, "causal": True, "world_size": 3, "seed": 113474}
STRIDED = {"heads": 8, "kv_heads": 1, "head_dim": 128, "seed": 671457}
ONE_KEY = {"heads": 4, "kv_heads": 2, "head_dim": 32, "mask": "sliding-window:1",
           "dtype": "float16"}  # fmt: skip
TWO_KEYS = {"heads": 128, "kv_heads": 64, "head_dim": 1, "mask": "sliding-window:2",
            "dtype": "bfloat16", "mode": "forward"}  # fmt: skip
ONE_VALUE = {"batch": 2, "heads": 6, "kv_heads": 3, "head_dim": 1, "causal": True, "world_size": 4,
             "seed": 574503, "mode": "forward"}  # fmt: skip
ONE_COLUMN = {"heads": 8, "kv_heads": 1, "head_dim": 2, "latent": "1+1", "sink": True,
              "mode": "decode"}  # fmt: skip
ONE_VALUE_AND_SINK = {"heads": 3, "kv_heads": 1, "head_dim": 1, "sink": True, "world_size": 2,
                      "repeats": 3, "threads": 1, "seed": 176205}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tokens", "options", "shape"),
    [
        ("usp", 1430, {"ulysses": 1}, RING),
        (
            "block-sparse-multihead",
            1,
            {"pattern": "strided", "sparsity": 0.6, "block": 16},
            STRIDED,
        ),
        ("collective", 1025, {"chunk": 30, "order": "zigzag"}, ONE_VALUE),
        ("sdpa", 600, {}, ONE_KEY),
        ("sdpa", 700, {}, TWO_KEYS),
        ("usp", 1000, {}, ONE_VALUE_AND_SINK),
        ("ring", 40, {"transport": "fairscale"}, {"mode": "forward", "world_size": 2}),
        ("ring", 2, {}, ONE_COLUMN),
    ],
)
def test_right_cases_that_were_called_wrong_once(
    launcher: LocalLauncher, name: str, tokens: int, options: Any, shape: dict[str, Any]
) -> None:
    """Terms of dv, of an element of the output, and of a row with one value cancel by chance.

    Of rows that see one key dq and dk are rounding errors alone. Known rows beside a sink need two
    columns of scores.
    """
    case = complete(launcher, name, tokens, options, **{"mode": "train", "repeats": 1, **shape})
    assert run_trial(launcher, case).status == "ok"


def test_an_old_layout_is_seen_if_a_pass_keeps_its_inputs_alone(launcher: LocalLauncher) -> None:
    fields: Any = {"mode": "train", "causal": True, "keep": "inputs", "repeats": 3}
    old, new = (
        run_trial(launcher, complete(launcher, name, 700, {"sparsity": 0.6}, **fields))
        for name in ("one-layout", "block-sparse-adaptive")
    )
    assert "with the layout that a new instance chooses" in (old.reason or "")
    assert new.status == "ok"


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_fault_it_is_right(launcher: LocalLauncher, ranks: int) -> None:
    assert run_case(launcher, Case("none", "bfloat16", ranks)).status == "ok"
