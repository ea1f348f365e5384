"""`maxlen` of a whole model in decode, without processes: outcomes come by formula."""

import json
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.api.length_search import maxlen
from longseq_bench.api.results import Results
from longseq_bench.core.cost import floor_bytes
from longseq_bench.core.errors import UserError
from longseq_bench.reports.brief import search_brief
from tests.api.test_api import Machine

MIB = 2**20
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 1000, "torch_dtype": "float32",
}  # fmt: skip
WEIGHTS = 4 * (2 * 1000 * 64 + 3 * (3 * 64 * 128 + 2 * 64 * (64 + 32)))
MIXED = {
    "sliding_window": 16,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "linear_attention", "full_attention"],
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longseq_bench.api.machine.make_launcher", Machine)
    monkeypatch.chdir(tmp_path)
    write_model({})


def write_model(changes: dict[str, Any]) -> None:
    Path("tiny.json").write_text(json.dumps(CONFIG | changes))


def search(**more: Any) -> Results:
    given = {"memory_budget": "4MiB", "model": "tiny.json", "mode": "decode", "progress": False}
    return maxlen("ring", **{**given, **more})


def test_the_caches_of_all_layers_fill_what_the_weights_leave() -> None:
    found = search()
    (row,) = found.maxima
    trial = found.records[0].trial
    assert (trial.memory_budget, trial.workload.weights) == (4 * MIB - WEIGHTS, WEIGHTS)
    # k and v of three layers, two heads of 16
    assert floor_bytes(trial.at(100).workload) == 100 * 3 * 2 * 2 * 16 * 4
    assert row.layers == 3
    assert row.max_tokens == pytest.approx((4 * MIB - WEIGHTS) / 1.05 / 768, rel=0.01)
    assert {one.trial.repeats for one in found.records if one.purpose == "confirm"} == {5}
    document = search_brief(found.records)
    label = f"all 3 layers of tiny, beside {WEIGHTS / 1024:.0f} KiB of weights"
    assert document.paragraphs[0].startswith(f"{label[:1].upper()}{label[1:]}, decode")
    (sentence,) = document.sections[-1].points
    foreseen = f"({row.predicted_tokens:,} predicted)"
    assert sentence.startswith(f"ring takes {row.max_tokens:,} tokens in {label} {foreseen}, ")
    assert " for their attention in a step, " in sentence


def test_layers_without_a_cache_are_not_counted_and_windows_end_caches() -> None:
    write_model(MIXED)
    (record, *_) = search().records
    w = record.trial.at(100).workload
    assert w.model.startswith("2 of 4 layers of tiny, without its weights")
    assert [(one.kind, one.layers, one.window) for one in w.layers] == [
        ("full", 1, None), ("sliding", 1, 16)
    ]  # fmt: skip
    assert floor_bytes(w) == (100 + 16) * 2 * 2 * 16 * 4


def test_a_model_of_latent_attention_caches_its_latent_once() -> None:
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 12}
    write_model({"model_type": "deepseek_v3", **heads})
    trial = search().records[0].trial
    assert floor_bytes(trial.at(100).workload) == 100 * 3 * (12 + 4) * 4
    one = search(layer="full").records[0].trial.workload
    assert (one.latent, one.heads, one.layers) == ("12+4/12", 4, ())
    assert floor_bytes(one) == one.seq_len * (12 + 4) * 4


def test_one_layer_is_measured_with_its_kind_or_in_another_mode() -> None:
    for more in ({"layer": "full"}, {"mode": "forward"}):
        trial = search(**more).records[0].trial
        assert (trial.workload.layers, trial.memory_budget) == ((), 4 * MIB)


def test_a_resumed_search_makes_the_same_trials() -> None:
    first, again = search(out="found"), search(out="found", memory_budget=None)
    assert [one.key for one in again.records] == [one.key for one in first.records]
    assert again.records[0].started_at == first.records[0].started_at


@pytest.mark.parametrize(
    ("changes", "more", "reason"),
    [
        ({}, {"memory_budget": "512KiB"}, "the weights of model tiny take .* a rank is 512 KiB"),
        ({}, {"kv_heads": 1}, "kv_heads can't be set for all layers of model tiny; name one kind"),
        ({}, {"mask": "sliding-window:8"}, "mask can't be set for all layers of model tiny"),
        (
            {"sliding_window": 16, "model_type": "mistral"},
            {},
            "no layer of model tiny keeps more than 16 tokens: .* --layer sliding",
        ),
    ],
)
def test_what_has_no_answer_is_refused(
    changes: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    write_model(changes)
    with pytest.raises(UserError, match=reason):
        search(**more)
