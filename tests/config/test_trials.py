"""Sweep files: the trials of a grid, and the sentence for each mistake."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.config.loader import load_config, parse_config
from longseq_bench.config.trials import make_sweep
from longseq_bench.core.catalogue import Catalogue, DeviceInfo, Entry
from longseq_bench.core.errors import ConfigError, UserError
from longseq_bench.core.model import Trial
from longseq_bench.core.options import OptionSpec, parse_assignments

CHUNK = OptionSpec(name="chunk", kind="int", default=1024)
LONGNET = (
    OptionSpec(name="segments", kind="ints", default=(1024,)),
    OptionSpec(name="dilation", kind="ints", default=(1,)),
    OptionSpec(name="mix", kind="str", default="softmax", choices=("softmax", "groups")),
)
SPARSE = (
    OptionSpec(name="pattern", kind="str", default="local-window",
               choices=("local-window", "dilated-sparse", "sink-window")),
    OptionSpec(name="sparsity", kind="float", default=0.9),
    OptionSpec(name="block", kind="int", default=64),
    OptionSpec(name="seed", kind="int", default=0),
)  # fmt: skip
CATALOGUE = Catalogue(
    implementations={
        "sdpa": Entry(summary="", options=(OptionSpec(name="backend", kind="str", optional=True),)),
        "dense": Entry(summary=""),
        "ring": Entry(summary="", options=(CHUNK,)),
        "collective": Entry(summary="", options=(CHUNK,)),
        "block-sparse": Entry(summary="", options=SPARSE),
        "dilated": Entry(summary="", options=LONGNET),
        "hilbert": Entry(summary="", options=LONGNET),
    },
    devices={
        "cpu": DeviceInfo(name="a CPU", dtypes=("float32", "bfloat16")),
        "cuda": DeviceInfo(unavailable="no NVIDIA driver"),
    },
)
EXAMPLE = """\
device: cpu
memory_budget: 512MiB
workload: {batch: 1, heads: 8, head_dim: 64, dtype: float32, causal: [false, true], mode: forward}
tokens: [1k, 2k, 4k, 8k]
baseline: sdpa
implementations:
  - sdpa
  - ring: {chunk: 1k}
  - block-sparse: {pattern: [local-window, dilated-sparse], sparsity: [0.9, 0.99]}
"""
SHORT = "tokens: 1k\nimplementations: [sdpa]\n"


def trials(text: str) -> tuple[Trial, ...]:
    return make_sweep(parse_config(text, "sweep.yaml"), CATALOGUE).trials


def refusal(text: str) -> str:
    """What a text is refused with; any error that is not the user's fails the test."""
    with pytest.raises(UserError) as caught:
        make_sweep(parse_config(text, "sweep.yaml"), CATALOGUE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the grid ----------------------------------------------------------------------------------


def test_every_list_is_an_axis() -> None:
    found = trials(EXAMPLE)
    assert len(found) == 2 * 4 * (1 + 1 + 2 * 2)
    assert {t.workload.seq_len for t in found} == {1024, 2048, 4096, 8192}
    assert {t.workload.causal for t in found} == {False, True}
    sparse = {
        (t.options["pattern"], t.options["sparsity"]) for t in found if "pattern" in t.options
    }
    assert sparse == {(p, s) for p in ("local-window", "dilated-sparse") for s in (0.9, 0.99)}
    assert {t.memory_budget for t in found} == {512 * 2**20}
    # rows to compare are adjacent
    names = ["sdpa", "ring"] + ["block-sparse"] * 4
    assert [t.implementation for t in found] == names * 8
    lengths = [t.workload.seq_len for t in found]
    assert lengths == [n for n in (1024, 2048, 4096, 8192) for _ in names] * 2


def test_settings_are_axes_too() -> None:
    text = (
        "memory_budget: [1GiB, none]\ntime_budget: [2min, ~]\nworld_size: [1, 2]\n"
        "threads: [1, none]\nrepeats: [0, 5]\ntime_cap: [1s, 500ms]\n" + SHORT
    )
    found = trials(text)
    assert {(t.memory_budget, t.time_budget, t.world_size) for t in found} == {
        *itertools.product((2**30, None), (120.0, None), (1, 2))
    }
    assert {(t.threads, t.repeats, t.time_cap) for t in found} == {
        *itertools.product((1, None), (0, 5), (1.0, 0.5))
    }
    assert len(found) == 2**6


def test_missing_keys_have_the_defaults_of_a_trial() -> None:
    (found,) = trials(SHORT)
    assert found == Trial(
        implementation="sdpa",
        options={"backend": None},
        workload=found.workload.model_validate({"seq_len": 1024}),
    )
    read = make_sweep(parse_config(SHORT, "sweep.yaml"), CATALOGUE)
    assert (read.rounds, read.baseline, read.text) == (3, None, SHORT)
    assert make_sweep(parse_config(SHORT + "rounds: 5\n", "sweep.yaml"), CATALOGUE).rounds == 5


def test_numbers_with_commas_are_one_value_and_a_list_is_an_axis() -> None:
    head = "tokens: 8k\nimplementations:\n  - dilated: "
    together = trials(head + '{segments: ["1024,2k", "4k,8k"], dilation: "1,2"}\n')
    assert [t.options["segments"] for t in together] == [(1024, 2048), (4096, 8192)]
    assert {t.options["dilation"] for t in together} == {(1, 2)}
    apart = trials(head + "{segments: [1024, 2048]}\n")
    assert [t.options["segments"] for t in apart] == [(1024,), (2048,)]


# ---- mistakes ----------------------------------------------------------------------------------

TAIL = "implementations: [sdpa]\n"
ONE = "tokens: 1k\nimplementations:\n  - "
MISTAKES = {
    "unknown key": ("tokns: 1k\n" + SHORT, "1: unknown key 'tokns'; did you mean 'tokens'?"),
    "workload key at the top": (SHORT + "heads: 8\n",
        "3: heads belongs under workload, as in workload: {heads: ...}"),
    "top key in workload": (SHORT + "workload: {tokens: 1k}\n",
        "3: tokens belongs at the top level, not under workload"),
    "unknown implementation": (ONE + "sdpa\n  - rign\n",
        "4: unknown implementation 'rign'; did you mean 'ring'?"),
    "unknown option": (ONE + "ring:\n      chnk: 1k\n",
        "4: unknown option 'chnk' in ring; did you mean 'chunk'?"),
    "commas without quotes": (ONE + "dilated: {segments: 512,1024}\n",
        "3: unknown option '1024' in dilated; it followed a comma: quote a value that has commas"),
    "the old name of sparsity": (ONE + "block-sparse: {sparsity_ratio: 0.1}\n",
        "3: there is no option 'sparsity_ratio' in block-sparse: it meant density, the fraction "
        "of the blocks that is kept; write sparsity, the fraction that is skipped"),
    "value of an option": (ONE + "ring:\n      chunk: [1k, many]\n",
        "4: option chunk='many' in ring is not a whole number from 1 up (write 1024 or 1k)"),
    "options not indented": (ONE + "ring:\n    chunk: 1k\n",
        "3: an item of implementations names ring, chunk; write one name, its options indented "
        "under it"),
    "broken YAML": ("tokens: [1k, 2k\nimplementations: [sdpa]\n",
        "2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
    "tokens": ("tokens: [1k,\n  12q]\n" + TAIL,
        "2: tokens '12q' can't be read; write 4096, 4k or 1M"),
    "tokens with commas": ("tokens: 1k,2k\n" + TAIL,
        "1: tokens '1k,2k' can't be read; write 4096, 4k or 1M (for several values write a list, "
        "[1k,2k])"),
    "memory budget": (SHORT + "memory_budget: -3GiB\n",
        "3: memory_budget: bytes '-3GiB' can't be read; write 512MiB or 7.9GiB"),
    "heads not divisible": (SHORT + "workload:\n  heads: 8\n  kv_heads: [4, 3]\n",
        "5: heads 8 is not divisible by kv_heads 3; kv_heads may be 1, 2, 4, 8"),
    "heads of a model": (SHORT + "workload: {model: llama-3.1-8b, heads: 12}\n",
        "3: heads 12 is not divisible by kv_heads 8; kv_heads may be 1, 2, 3, 4, 6, 12"),
    "device that is not there": (SHORT + "device: [cpu, cuda]\n",
        "3: device cuda is not available: no NVIDIA driver; available: cpu"),
    "dtype that the device lacks": (SHORT + "workload:\n  dtype: [float32,\n    float16]\n",
        "5: dtype float16 is not available on cpu; use float32 or bfloat16"),
    "empty": ("# nothing yet\n", "is empty; start from configs/quickstart.yaml of the repository"),
    "no tokens": (TAIL, "tokens is missing; start from configs/quickstart.yaml of the repository"),
    "a key without a value": ("tokens:\n" + TAIL, "1: tokens has no value"),
    "key twice": ("tokens: 1k\nimplementations: [sdpa]\ntokens: 2k\n",
        "3: tokens is written twice, first in line 1; remove one"),
    "several mistakes, the first in the file": (
        "tokens: 1k\nworkload: {heads: -1}\ndevise: cpu\nimplementations: [sdpa]\n",
        "2: heads -1 is too small; the minimum is 1"),
    "list for the config": ("- tokens: 1k\n",
        "1: the config must be a mapping of keys to values, not a list"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_has_its_message(mistake: str) -> None:
    text, sentence = MISTAKES[mistake]
    assert refusal(text).removeprefix("sweep.yaml").lstrip(" :") == sentence


def test_aliases_are_read() -> None:
    assert len(trials("tokens: &a [1024, 2048]\nimplementations: [sdpa]\nseed: *a\n")) == 4


def test_a_grid_too_large_is_refused_before_it_is_built() -> None:
    many = ", ".join(str(n) for n in range(1, 1001))
    text = f"tokens: [{many}]\nseed: [{many}]\nimplementations:\n  - ring: {{chunk: [{many}]}}\n"
    assert refusal(text) == ("sweep.yaml: the grid has 1,000,000,000 trials, more than 100,000")


def with_gpus(**cuda: Any) -> Catalogue:
    devices = {**CATALOGUE.devices, "cuda": DeviceInfo(name="G", **cuda)}
    return CATALOGUE.model_copy(update={"devices": devices})


@pytest.mark.parametrize(
    ("devices", "count", "present"),
    [("cuda", 2, "2 CUDA devices"), ("[cpu, cuda]", 1, "1 CUDA device")],
)
def test_more_ranks_than_cuda_devices_are_refused_with_their_line(
    devices: str, count: int, present: str
) -> None:
    text = SHORT + f"device: {devices}\nworld_size: [1,\n  {count}, 3]\n"
    with pytest.raises(ConfigError) as caught:
        make_sweep(parse_config(text, "sweep.yaml"), with_gpus(count=count))
    assert f":5: world_size 3 is too large: this machine has {present}, and" in str(caught.value)


# ---- the file ----------------------------------------------------------------------------------


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("\ufeff" + EXAMPLE, encoding="utf-8")
    read = make_sweep(load_config(path), CATALOGUE)
    assert (read.trials, read.text) == (trials(EXAMPLE), EXAMPLE)


def test_a_missing_file_suggests_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SHORT)
    (tmp_path / "notes.txt").write_text("")
    for command, message in {
        "quikstart.yaml": f"did you mean {tmp_path / 'quickstart.yaml'}?",
        "none/sweep.yaml": "start from configs/quickstart.yaml of the repository",
    }.items():
        with pytest.raises(ConfigError) as caught:
            make_sweep(load_config(tmp_path / command), CATALOGUE)
        assert str(caught.value) == f"there is no config {tmp_path / command}; {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"tokens: \xff\xfe", r"a\.yaml is not UTF-8 text \(byte 8\)"),
        (None, "can't be read: Is a directory"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "a.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


# ---- options on the command line ---------------------------------------------------------------


def test_assignments_are_names_and_text() -> None:
    found = parse_assignments(["sparsity=0.99", "segments=1024,2048", " mix = a=b "])
    assert found == {"sparsity": "0.99", "segments": "1024,2048", "mix": "a=b"}


# ---- models ------------------------------------------------------------------------------------


def test_a_model_gives_a_workload_its_shape_and_keys_beside_it_override() -> None:
    made = trials(SHORT + "workload: {model: gemma-2-9b, soft_cap: [50, 30, none]}\n")
    assert [t.workload.soft_cap for t in made] == [50, 30, None]
    assert made[2].workload.model == "gemma-2-9b with other soft_cap"
    made = trials(SHORT + "workload: {model: [qwen3-32b, gpt-oss-20b], kv_heads: [8, 0]}\n")
    shapes = [
        (t.workload.model, t.workload.heads, t.workload.kv_heads, t.workload.head_dim) for t in made
    ]
    assert shapes == [
        ("qwen3-32b", 64, 8, 128), ("qwen3-32b with other kv_heads", 64, 64, 128),
        ("gpt-oss-20b", 64, 8, 64), ("gpt-oss-20b with other kv_heads", 64, 64, 64),
    ]  # fmt: skip
    # gpt-oss has no dtype in its file; that of the device is used
    assert [t.workload.dtype for t in made] == [*["bfloat16"] * 2, *["float32"] * 2]
    assert [t.workload.sink for t in made] == [False, False, True, True]
