"""`longseq models` and `--model`."""

import json
from pathlib import Path

import pytest

from longseq_bench.cli import run
from longseq_bench.store import load
from tests.cli.commands import Capture, document, refusal

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "torch_dtype": "float32",
}  # fmt: skip
SMALL = ("--impl", "dense", "--memory-budget", "8MiB", "--ceiling", "64", "--threads", "1")


@pytest.fixture(autouse=True)
def _tiny() -> None:
    """The folder of a model, tiny/config.json."""
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps(CONFIG))


def test_models_are_listed_with_their_shapes_and_sources(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    models = {m["name"]: m for m in document(capfd, "models")["models"]}
    assert len(models) == 34
    assert (models["deepseek-v3"]["head_dim"], models["deepseek-v3"]["v_head_dim"]) == (192, 128)
    assert run(["models"]) == 0
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("qwen3-30b-a3b")]
    source = "https://github.com/Lightning-AI/litgpt/blob/26857050/litgpt/config.py"
    assert line.split() == [
        "qwen3-30b-a3b", "32", "4", "128", "48", "full", "2,048", "bfloat16", "30.5", "G", source
    ]  # fmt: skip


def test_a_file_can_be_shown_and_says_why_its_weights_are_unknown(capfd: Capture) -> None:
    (m,) = document(capfd, "models", "--model", "tiny")["models"]
    assert (m["name"], m["heads"], m["kv_heads"], m["head_dim"], m["layers"]) == (
        "tiny", 4, 2, 16, 3
    )  # fmt: skip
    assert "no vocab_size" in m["parameters_reason"]


def test_a_search_takes_the_shape_of_a_model_and_echoes_it(capfd: Capture) -> None:
    command = ["maxlen", *SMALL, "--model", "tiny", "--kv-heads", "1", "--out", "out"]
    assert run(command) == 0
    printed = capfd.readouterr()
    line = "model tiny: 4 heads, 2 KV heads, head_dim 16, layers 3 full, float32 (tiny/config.json)"
    assert f"{line}; overridden: kv_heads 1" in printed.err
    assert "Model tiny with other kv_heads" in printed.out
    w = load(Path("out")).records[0].trial.workload
    assert (w.heads, w.kv_heads, w.head_dim, w.v_head_dim, w.dtype) == (4, 1, 16, 16, "float32")
    assert w.model == "tiny with other kv_heads"
    (row,) = document(capfd, *command)["results"]
    assert (row["model"], row["v_head_dim"]) == ("tiny with other kv_heads", 16)


def test_a_sweep_takes_several_models(capfd: Capture) -> None:
    Path("configs").mkdir()
    Path("configs/a.yaml").write_text(
        "tokens: 64\nimplementations: [dense]\nrepeats: 1\nrounds: 1\nmemory_budget: 64MiB\n"
        "workload: {model: [../tiny, mistral-7b-v0.3], dtype: float32}\n"
    )
    trials = document(capfd, "sweep", "configs/a.yaml", "--dry-run")["trials"]
    names = ("model", "heads", "kv_heads", "head_dim")
    assert [tuple(one["workload"][name] for name in names) for one in trials] == [
        ("tiny", 4, 2, 16), ("mistral-7b-v0.3 with other dtype", 32, 8, 128),
    ]  # fmt: skip


def test_a_kind_of_layers_gives_its_shape_and_its_mask(capfd: Capture) -> None:
    mixed = {"sliding_window": 16, "swa_num_key_value_heads": 1, "layer_types":
             ["sliding_attention", "full_attention", "linear_attention"]}  # fmt: skip
    Path("tiny/config.json").write_text(json.dumps(CONFIG | mixed))
    Path("a.yaml").write_text(
        "tokens: 64\nimplementations: [sdpa]\nworkload: {model: tiny, layer: [full, sliding]}\n"
    )
    trials = document(capfd, "sweep", "a.yaml", "--dry-run")["trials"]
    assert [[one["workload"][n] for n in ("model", "kv_heads", "mask")] for one in trials] == [
        ["tiny (full layer)", 2, None], ["tiny (sliding layer)", 1, "sliding-window:16"]
    ]  # fmt: skip
    command = ["plan", "--impl", "sdpa", "--model", "tiny"]
    (row,) = document(capfd, *command, "--layer", "sliding", "--target", "1k")["results"]
    assert (row["workload"]["kv_heads"], row["workload"]["mask"]) == (1, "sliding-window:16")
    assert run([*command, "--target", "1k"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    kinds = "1 full, 1 sliding 16, 1 linear"
    assert f"layers {kinds}, float32" in printed
    assert "a single layer is of the first kind and sees all tokens" in printed
    assert refusal(capfd, *command, "--layer", "chunked") == (
        f"model tiny has no chunked layers whose mask is known here; it has {kinds}"
    )
    assert refusal(capfd, "plan", "--impl", "sdpa", "--layer", "full") == (
        "layer full is of a model; name one with --model"
    )
    Path("a.yaml").write_text("tokens: 64\nimplementations: [sdpa]\nworkload: {layer: full}\n")
    assert refusal(capfd, "sweep", "a.yaml", "--dry-run") == (
        "a.yaml:3: layer is of a model; name it with model"
    )


def test_ids_of_hugging_face_are_built_in_models_or_say_how_to_get_the_file(capfd: Capture) -> None:
    ids = ["meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/qwen3-8b-base"]
    names = [document(capfd, "models", "--model", one)["models"][0]["name"] for one in ids]
    assert names == ["llama-3.1-8b", "gemma-2-9b", "qwen3-8b"]
    assert refusal(capfd, "models", "--model", "someone/llama-3.1-8b") == (
        "model someone/llama-3.1-8b is not built in, and there is no such file; get its file with "
        "`hf download someone/llama-3.1-8b config.json --local-dir llama-3.1-8b` and give --model "
        "./llama-3.1-8b"
    )


@pytest.mark.parametrize(
    ("model", "sentence"),
    [("llama-3.1-80b", "unknown model 'llama-3.1-80b'; did you mean 'llama-3.1-8b'?"),
     ("no/config.json", "no/config.json can't be read: No such file or directory")],
)  # fmt: skip
def test_a_model_that_can_not_be_used_is_refused(model: str, sentence: str, capfd: Capture) -> None:
    assert refusal(capfd, "maxlen", *SMALL, "--model", model, "--out", "out") == sentence
    assert refusal(capfd, "plan", "--impl", "ring", "--model", model) == sentence
    assert refusal(capfd, "models", "--model", model) == sentence
    Path("a.yaml").write_text(
        f"tokens: 64\nimplementations: [dense]\nworkload:\n  model: [tiny,\n    {model}]\n"
    )
    assert refusal(capfd, "sweep", "a.yaml", "--out", "out") == f"a.yaml:5: {sentence}"
    assert not Path("out").exists()
