"""Shapes of models: the built-in ones against published counts, and files of config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.config.models import built_in_models, load_model
from longseq_bench.core.errors import ConfigError
from longseq_bench.core.model import Workload
from longseq_bench.core.model_files import describe_layers
from longseq_bench.core.model_shapes import ModelShape, parse_config

# Parameters of the tensors on Hugging Face (model.safetensors.index.json; of Gemma 3 and Llama 4
# without the vision tower, of DeepSeek and GLM without the layer that predicts a second token). A
# wrong hidden size, head count, head_dim, layer count or expert count changes them by far more than
# the norms and biases that the formula leaves out.
PUBLISHED_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.3": 7_248_023_552, "mistral-nemo": 12_247_782_400,
    "mistral-large-2": 122_610_069_504,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gemma-3-12b": 11_765_788_416, "gemma-3-27b": 27_009_346_304,
    "llama-4-scout": 107_769_861_120, "llama-4-maverick": 400_711_848_960,
    "deepseek-v3": 671_026_419_200, "deepseek-v3.1": 671_026_419_200,
    "deepseek-v3.2": 671_877_944_064, "kimi-k2": 1_026_408_232_448, "glm-5": 743_911_252_224,
    "minimax-m2": 228_689_764_864,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
}  # fmt: skip

# counted by hand from the configs of models whose numbers are in the data file
BY_HAND = {
    "qwen3-next-80b-a3b": 79_674_081_280, "qwen3.5-397b-a17b": 396_345_589_760,
    "kimi-linear-48b": 49_122_459_648, "gemma-4-26b-a4b": 25_232_441_344,
    "gemma-4-31b": 30_696_013_824,
}  # fmt: skip

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def changed(**changes: Any) -> dict[str, Any]:
    """Return LLAMA with other values; None leaves a key out."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}


def parse(**changes: Any) -> ModelShape:
    return parse_config(changed(**changes), "mine", "mine.json")


def test_built_in_models_have_the_published_number_of_parameters() -> None:
    models = {model.name: model for model in built_in_models()}
    counted = {name: one.parameters for name, one in models.items() if one.parameters}
    assert {one.parameters_reason for one in models.values()} == {None}
    assert {name: counted.pop(name) for name in BY_HAND} == pytest.approx(BY_HAND, rel=2e-3)
    assert counted.keys() == PUBLISHED_PARAMETERS.keys()
    assert counted == pytest.approx(PUBLISHED_PARAMETERS, rel=4e-4)
    assert all(counted[name] < number for name, number in PUBLISHED_PARAMETERS.items())


def test_every_built_in_model_has_a_source_and_its_windows() -> None:
    models = {m.name: m for m in built_in_models()}
    for m in models.values():
        assert m.source.startswith("https://")
        assert m.dtype == (None if m.name.startswith("gpt-oss") else "bfloat16")
    mixed = {n: describe_layers(m.kinds) for n, m in models.items() if len(m.kinds) > 1}
    assert mixed == {
        "llama-4-scout": "12 full, 36 chunked 8k", "llama-4-maverick": "12 full, 36 chunked 8k",
        "qwen3-next-80b-a3b": "12 full, 36 linear", "qwen3.5-397b-a17b": "15 full, 45 linear",
        "gemma-2-9b": "21 full, 21 sliding 4k", "gemma-2-27b": "23 full, 23 sliding 4k",
        "gemma-3-12b": "8 full, 40 sliding 1k", "gemma-3-27b": "10 full, 52 sliding 1k",
        "gemma-4-26b-a4b": "5 full, 25 sliding 1k", "gemma-4-31b": "10 full, 50 sliding 1k",
        "kimi-linear-48b": "7 full, 20 linear",
        "gpt-oss-20b": "12 full, 12 sliding 128", "gpt-oss-120b": "18 full, 18 sliding 128",
    }  # fmt: skip
    latents = {
        n: (one.kind, one.latent) for n, m in models.items() for one in m.kinds if one.latent
    }
    usual = "512+64/192"
    assert latents == {
        **dict.fromkeys(
            ["deepseek-v3", "deepseek-v3.1", "kimi-k2", "kimi-linear-48b"], ("full", usual)
        ),
        "deepseek-v3.2": ("top-k", usual),
        "glm-5": ("top-k", "512+64/256"),
    }


def test_a_config_file_is_read_by_path_or_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for text in (str(folder), str(folder / "config.json")):
        m = load_model(text)
        assert (m.name, m.source) == ("my-llama", str(folder / "config.json"))
        assert (m.heads, m.kv_heads, m.head_dim, m.layers) == (8, 2, 64, 4)
    assert load_model("my-llama/config.json", tmp_path).name == "my-llama"


def test_keys_that_a_file_leaves_out() -> None:
    assert parse(num_key_value_heads=None).kv_heads == 8
    assert parse(head_dim=128).head_dim == 128
    assert parse(torch_dtype=None, dtype="float16").dtype == "float16"
    assert parse(model_type="gemma2").head_dim == 256  # not 512 / 8
    assert describe_layers(parse(sliding_window=100, use_sliding_window=False).kinds) == "4 full"
    assert describe_layers(parse(sliding_window=100, max_window_layers=3).kinds) == (
        "3 full, 1 sliding 100"
    )


def test_a_multimodal_file_keeps_its_language_model_below_text_config() -> None:
    text = {**LLAMA, "torch_dtype": None}
    m = parse_config({"model_type": "llava", "text_config": text, "torch_dtype": "float16"}, "", "")
    assert (m.heads, m.layers, m.dtype) == (8, 4, None)


def test_weights_are_not_counted_where_the_formula_may_not_hold() -> None:
    assert parse().parameters == 2 * 512_000 + 4 * (2 * 512 * 64 * 10 + 3 * 512 * 1024)
    assert parse(tie_word_embeddings=True).parameters == parse().parameters - 512_000  # type: ignore[operator]
    other = parse(model_type="opt")
    assert other.parameters is None
    assert "opt" in str(other.parameters_reason)
    assert "no vocab_size" in str(parse(vocab_size=None).parameters_reason)
    mixed = parse(sliding_window=9, max_window_layers=2, swa_num_key_value_heads=1)
    assert mixed.parameters_reason == "weights are not counted: the layers have different shapes"
    assert parse(torch_dtype="float8_e4m3fn").dtype is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [("heads: 8", "is not a JSON file; give a config.json"), ("[1]", "has no keys"),
     ({"num_attention_heads": None},
      "it has no num_attention_heads; give the config.json of a transformer"),
     ({"hidden_size": "big"}, "its hidden_size 'big' is not a whole number from 1 up"),
     ({"hidden_size": 511}, "it has no head_dim, and its hidden_size 511 is not divisible by"),
     ({"num_key_value_heads": 3}, "num_attention_heads 8 is not divisible by num_key_value_heads")],
)  # fmt: skip
def test_a_file_with_wrong_keys_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any] | str, message: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(changes if isinstance(changes, str) else json.dumps(changed(**changes)))
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    assert str(caught.value).removeprefix(f"model {path}").lstrip(": ").startswith(message)


def test_given_fields_override_a_model_and_its_label_says_so() -> None:
    deepseek = load_model("DeepSeek-V3")
    fields = deepseek.workload_fields({"causal": True})
    assert fields == {
        "heads": 128, "kv_heads": 128, "head_dim": 192, "v_head_dim": 128, "dtype": "bfloat16",
        "causal": True, "sink": False, "model": "deepseek-v3",
    }  # fmt: skip
    other = deepseek.workload_fields({"heads": 16, "kv_heads": 0, "head_dim": 64, "dtype": "bf16"})
    assert (other["kv_heads"], other["v_head_dim"]) == (16, 64)
    assert other["model"] == "deepseek-v3 with other heads, kv_heads, head_dim, v_head_dim"
    assert deepseek.workload_fields({"heads": 16})["kv_heads"] == 16  # each head has its own
    assert load_model("llama-3.1-8b").workload_fields({"heads": 16})["kv_heads"] == 8
    step = deepseek.workload_fields({"mode": "decode", "heads": 16})
    assert (step["latent"], step["model"]) == ("512+64/192", "deepseek-v3 with other heads")
    assert "overridden: heads 16;" in deepseek.describe(Workload(seq_len=1, **step))
    assert "latent" not in deepseek.workload_fields({"mode": "decode", "kv_heads": 128})
    line = deepseek.describe(Workload(seq_len=1, **other))
    assert (
        "128 KV heads, head_dim 192 (of v 128), layers 61 full, bfloat16 (https://hugging" in line
    )
    assert "overridden: heads 16, kv_heads 16, head_dim 64, v_head_dim 64" in line
    assert "overridden" not in deepseek.describe(Workload(seq_len=1, **fields))
