"""Data models: validation, and equality after JSON."""

from typing import Any

import pytest
from pydantic import ValidationError

from longseq_bench.core.cost import key_bytes_per_token
from longseq_bench.core.model import Environment, Layers, OptionValue, Trial, Workload
from tests.make import environment, on_ranks, trial


def test_a_trial_comes_back_from_json_with_its_types_and_key() -> None:
    options: dict[str, OptionValue] = {
        "a": (1, 2), "b": 1.0, "c": True, "d": "1", "e": None, "f": 1, "g": (3,)
    }  # fmt: skip
    sent = trial(options=options, memory_budget=2**30, time_budget=1.5, threads=2)
    back = Trial.model_validate_json(sent.model_dump_json())
    assert back == sent
    assert back.key == sent.key
    assert {k: type(v) for k, v in back.options.items()} == {k: type(v) for k, v in options.items()}


def test_every_field_of_a_trial_and_its_workload_changes_its_key() -> None:
    changes: dict[str, Any] = {
        "implementation": "ring", "options": {"chunk": 2}, "device": "cuda", "world_size": 2,
        "memory_budget": 2**20, "time_budget": 3.0, "repeats": 0, "time_cap": 1.0, "threads": 1,
        "seed": 1, "round": 1, "fit_only": True, "keep": "inputs",
        "allocator": "expandable", "workload": {"seq_len": 9}, "dense_kernel": "sdpa",
        "source": "0" * 16, "timing": "cold",
    }  # fmt: skip
    assert set(changes) == set(Trial.model_fields)
    keys = {trial().replace(**{field: value}).key for field, value in changes.items()}
    assert len(keys | {trial().key}) == len(changes) + 1
    workload: dict[str, Any] = {
        "batch": 2, "heads": 16, "kv_heads": 4, "head_dim": 32, "dtype": "float16",
        "causal": True, "mode": "train", "mask": "sliding-window:4", "v_head_dim": 32, "sink": True,
        "soft_cap": 50.0,
    }  # fmt: skip
    of_decode = {"new_tokens", "layers", "kv_dtype"}
    labels = {"model", "weights"}
    later = {*of_decode, "latent"}
    assert {"seq_len", *workload} == {*Workload.model_fields} - later - labels
    keys = {trial(**{field: value}).key for field, value in workload.items()}
    # 0 means 1 in decode
    keys |= {trial(mode="decode", new_tokens=n).key for n in (0, 1, 2)}
    keys |= {trial(mode="decode", layers=(layers_of(n),)).key for n in (1, 32)}
    cached = {"heads": 8, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "mode": "decode"}
    latents = None, "512+64", "512+64/192", "512+64/256"
    keys |= {trial(**cached, latent=latent).key for latent in latents}
    keys |= {trial(mode="decode", kv_dtype=kind).key for kind in ("int8", "fp8", None)}
    assert len(keys | {trial().key}) == len(workload) + 10


def layers_of(count: int, window: int | None = None) -> Layers:
    shape = {"heads": 8, "kv_heads": 8, "head_dim": 64, "v_head_dim": 64}
    return Layers(kind="any", layers=count, window=window, **shape)


def test_records_from_before_a_field_keep_their_keys() -> None:
    assert trial("ring", 4096, mode="decode").key == "374b1b14c7990697"
    assert trial("ring", 4096).key == "53e286be136ad417"


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "cached", "mask"),
    [(9, 1, 9, None), (10, 1, 10, None), (50, 1, 10, None), (50, 3, 12, "sliding-window:10")],
)
def test_a_layer_with_a_window_caches_what_its_new_tokens_see(
    tokens: int, new_tokens: int, cached: int, mask: str | None
) -> None:
    kinds = layers_of(2), layers_of(3, window=10)
    w = trial(seq_len=tokens, mode="decode", new_tokens=new_tokens, layers=kinds).workload
    found = [(layers, one.seq_len, one.mask) for layers, one in w.of_kinds()]
    assert found == [(2, tokens, None), (3, cached, mask)]


def test_a_step_of_decoding_has_one_new_token_by_default() -> None:
    w = trial("ring", 4096, mode="decode").workload
    assert (w.new_tokens, w.queries) == (1, range(4095, 4096))
    assert trial("ring", 4096, mode="decode", new_tokens=3).workload.queries == range(4093, 4096)
    assert trial("ring", 4096).workload.queries == range(4096)


def test_new_tokens_need_decode_and_room_in_the_cache() -> None:
    with pytest.raises(ValidationError, match="new_tokens 2 needs mode decode"):
        trial(mode="train", new_tokens=2)
    with pytest.raises(ValidationError, match="kv_dtype int8 needs mode decode"):
        trial(kv_dtype="int8")
    with pytest.raises(ValidationError, match="new_tokens 9 are more than the cache of 8 tokens"):
        trial(seq_len=8, mode="decode", new_tokens=9)
    # a search may ask for a length below the new tokens
    assert trial(seq_len=8, mode="decode", new_tokens=4).at(2).workload.seq_len == 4


def test_a_latent_is_the_one_kv_head_of_a_step_of_decoding() -> None:
    w = trial(mode="decode", heads=16, latent="512+64").workload
    assert (w.kv_heads, w.head_dim, w.v_head_dim, w.latent) == (1, 576, 512, "512+64/192")
    assert (w.scale, trial().workload.scale) == (192**-0.5, 64**-0.5)
    assert key_bytes_per_token(w) == 576 * 4
    for fields, reason in {
        ("latent", "512"): "latent 512 is no latent; write its two parts, as in 512[+]64/192",
        ("head_dim", 64): "latent 512[+]64/192 sets head_dim; leave them out",
        ("mode", "forward"): "latent 512[+]64/192 needs mode decode",
    }.items():
        with pytest.raises(ValidationError, match=reason):
            Workload(**{"seq_len": 8, "mode": "decode", "latent": "512+64", fields[0]: fields[1]})


def test_labels_are_no_part_of_the_key() -> None:
    """The model of a shape, its weights, and the folder of an own function's file."""
    labels = ("", "llama-3.1-8b", "mistral-7b-v0.3")
    trials = [trial("ring", 4096, model=one, weights=i) for i, one in enumerate(labels)]
    assert len({one.key for one in trials}) == 1
    assert len({one.key_without("round") for one in trials}) == 3  # they stay rows of their own
    here, there = (trial(f"{folder}/x.py:f", source="0" * 16) for folder in ("here", "there"))
    assert here.key == there.key
    assert here.key != here.replace(implementation="here/x.py:g").key


def test_samples_are_taken_over_ranks() -> None:
    both = on_ranks({"time": [1.0, 2.0], "peak": 9.0}, {"time": [3.0, 1.5]})
    assert both.samples("time") == (1.0, 2.0, 3.0, 1.5)
    assert both.largest("time") == 3.0
    assert both.largest("energy") is None


def test_the_fingerprint_covers_all_fields_but_volatile_ones() -> None:
    changes: dict[str, Any] = {
        "host": "beta", "os": "macOS", "cpu": "other", "cores": 3, "memory_bytes": 1,
        "gpus": ("H200",), "driver": "1", "python": "3.12", "torch": "2.12", "longseq": "0.2",
        "variables": {"OMP_NUM_THREADS": "1"}, "cuda": "13.0", "cudnn": "9.10", "nccl": "2.28",
        "triton": "3.8.0", "power_limits_w": (700.0,), "workers": 2,
    }  # fmt: skip
    volatile: dict[str, Any] = {
        "load": (9.0, 9.0, 9.0), "clock_mhz": 800.0, "commit": "other", "sm_clocks_mhz": (1980.0,)
    }  # fmt: skip
    assert {*changes, *volatile} == set(Environment.model_fields)
    prints = {environment(**{field: v}).fingerprint for field, v in changes.items()}
    assert len(prints | {environment().fingerprint}) == len(changes) + 1
    assert environment(**volatile).fingerprint == environment().fingerprint


def test_keys_and_fingerprints_never_change() -> None:
    """Records of other versions are found by these keys."""
    spread = trial(
        "hilbert", 2048, {"segments": (512, 1024), "dilation": (1, 2), "mix": "softmax"},
        batch=2, heads=4, causal=True, mode="train", world_size=2, memory_budget=201326592,
        time_budget=20.0, repeats=8, time_cap=0.3, threads=1, round=1,
    )  # fmt: skip
    assert spread.key == "bb7a88548c98c291"
    # records from before some fields
    data = spread.model_dump(mode="json")
    del data["workload"]["v_head_dim"], data["workload"]["model"], data["workload"]["new_tokens"]
    assert Trial.model_validate(data) == spread
    assert trial("ring", options={"chunk": 4096, "wire": None}).key == "d1ca31ab311c6736"
    known = {"host": "vm", "os": "Linux 6.18.44-fc-v669", "cpu": "Intel(R) Xeon(R) Processor",
             "cores": 2, "memory_bytes": 25276502016, "python": "3.11.7", "torch": "2.13.0+cpu",
             "longseq": "0.1.0"}  # fmt: skip
    assert Environment.model_validate(known).fingerprint == "81c5323238662500"
    prints = {
        Environment.model_validate(
            {**known, "gpus": ("H200",), "variables": dict(pairs)}
        ).fingerprint
        for pairs in ([("A", "1"), ("B", "2")], [("B", "2"), ("A", "1")])
    }
    assert prints == {"07d1a8d351801da8"}
