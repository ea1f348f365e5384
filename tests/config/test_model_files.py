"""Model files: the keys of real config.json files, and what the models' own code makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from longseq_bench.config import models
from longseq_bench.config.models import load_model
from longseq_bench.core.errors import ConfigError
from longseq_bench.core.files import load_table
from longseq_bench.core.model_files import describe_layers
from longseq_bench.core.model_shapes import ModelShape, parse_config


def mla(nope: int, rope: int, **keys: Any) -> dict[str, Any]:
    return {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "kv_lora_rank": 512, **keys}


def standard(heads: int, hidden: int, layers: int, **keys: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "hidden_size": hidden, "num_hidden_layers": layers}
    return {**sizes, **keys}


def gpt(heads: int, hidden: int, layers: int, **keys: Any) -> dict[str, Any]:
    return {"n_head": heads, "n_embd": hidden, "n_layer": layers, **keys}


def block(**attention: Any) -> dict[str, Any]:
    return {"attention": {"n_heads_in_group": None, "no_op": False, **attention}}


FIVE_TO_ONE = (["sliding_attention"] * 5 + ["full_attention"]) * 5
NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
LLAMA_3B = standard(24, 3072, 28, num_key_value_heads=8, head_dim=128)

# model: keys of its file; heads, KV heads, head_dim, v_head_dim; layers. The values are those of
# the classes of transformers, or of the model's own code where transformers has none. Some have
# fewer layers than the model.
FILES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int], str]] = {
    "falcon-7b": (
        standard(71, 4544, 32, num_kv_heads=71, multi_query=True, model_type="falcon"),
        (71, 1, 64, 64), "32 full"),
    "falcon-40b": (
        standard(128, 8192, 60, n_head_kv=8, multi_query=True, new_decoder_architecture=True,
                 model_type="falcon"),
        (128, 8, 64, 64), "60 full"),
    "santacoder": (
        gpt(16, 2048, 24, multi_query=True, model_type="gpt_bigcode"),
        (16, 1, 128, 128), "24 full"),
    "santacoder, own code": (
        gpt(16, 2048, 24, attention_head_type="multiquery", model_type="gpt2"),
        (16, 1, 128, 128), "24 full"),
    "glm-4-9b": (
        {"num_attention_heads": 32, "hidden_size": 4096, "num_layers": 40, "kv_channels": 128,
         "multi_query_attention": True, "multi_query_group_num": 2, "model_type": "chatglm"},
        (32, 2, 128, 128), "40 full"),
    "nemotron-nas": (
        standard(64, 8192, 5, num_key_value_heads=None, model_type="nemotron-nas", block_configs=[
            block(n_heads_in_group=8), block(no_op=True), block(n_heads_in_group=16),
            block(replace_with_linear=True), block(n_heads_in_group=8)]),
        (64, 8, 128, 128),
        "2 full, 1 full, 2 none"),
    "gemma-4-26b-a4b": (
        {"model_type": "gemma4", "text_config": standard(
            16, 2816, 30, num_key_value_heads=8, num_global_key_value_heads=2, head_dim=256,
            global_head_dim=512, attention_k_eq_v=True, sliding_window=1024,
            layer_types=FIVE_TO_ONE, model_type="gemma4_text")},
        (16, 2, 512, 512),
        "5 full, 25 sliding 1k"),
    "deepseek-v4-flash, with a layer that predicts": (
        standard(64, 4096, 6, num_key_value_heads=1, head_dim=512, sliding_window=128,
                 compress_ratios=[0, 0, 4, 128, 4, 128, 0], num_nextn_predict_layers=1,
                 index_topk=512, model_type="deepseek_v4"),
        (64, 1, 512, 512), "2 sliding 128, 4 compressed"),
    "gemma 4, keys apart from values": (
        {"model_type": "gemma4", "text_config": standard(
            8, 2560, 30, num_key_value_heads=2, head_dim=256, sliding_window=512,
            num_global_key_value_heads=1, attention_k_eq_v=False, model_type="gemma4_text")},
        (8, 2, 512, 512),
        "5 full, 25 sliding 512"),
    "gemma-4-e2b, whose last 20 layers read the caches of others": (
        {"model_type": "gemma4", "text_config": standard(
            8, 1536, 35, num_key_value_heads=1, head_dim=256, sliding_window=512,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
            num_kv_shared_layers=20, model_type="gemma4_text")},
        (8, 1, 512, 512),
        "3 full, 12 sliding 512, 16 shared 512, 4 shared"),
    "minicpm3-4b": (
        standard(40, 2560, 62, num_key_value_heads=40, model_type="minicpm3", **mla(64, 32)),
        (40, 40, 96, 64), "62 full"),
    "deepseek-ocr": (
        {"model_type": "deepseek_vl_v2", "num_hidden_layers": 12, "language_config": standard(
            10, 1280, 12, num_key_value_heads=10, use_mla=False, v_head_dim=0,
            model_type="deepseek_v2", **mla(0, 0) | {"kv_lora_rank": None})},
        (10, 10, 128, 128), "12 full"),
    "qwen3-next-80b": (
        standard(16, 2048, 48, num_key_value_heads=2, head_dim=256, full_attention_interval=4,
                 model_type="qwen3_next"),
        (16, 2, 256, 256), "12 full, 36 linear"),
    "minimax-text-01": (
        standard(64, 6144, 80, num_key_value_heads=8, head_dim=128,
                 attn_type_list=([0] * 7 + [1]) * 10, model_type="minimax_text_01"),
        (64, 8, 128, 128), "10 full, 70 linear"),
    "llama-4-scout": (
        {"model_type": "llama4", "text_config": standard(
            40, 5120, 48, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192,
            no_rope_layers=[1, 1, 0] * 16, model_type="llama4_text")},
        (40, 8, 128, 128), "16 full, 32 chunked 8k"),
    "nemotron-h-8b": (
        standard(32, 4096, 52, num_key_value_heads=8, head_dim=128, attention_head_dim=128,
                 hybrid_override_pattern=NEMOTRON_H, model_type="nemotron_h"),
        (32, 8, 128, 128), "4 full, 24 linear, 24 none"),
    "deepseek-v3.2": (
        standard(128, 7168, 61, num_key_value_heads=128, v_head_dim=128, index_topk=2048,
                 index_n_heads=64, index_head_dim=128, model_type="deepseek_v32", **mla(128, 64)),
        (128, 128, 192, 128), "61 top-k"),
    "modernbert-base": (
        standard(12, 768, 22, global_attn_every_n_layers=3, local_attention=128,
                 model_type="modernbert"),
        (12, 12, 64, 64), "8 full, 14 sliding 128"),
    "command-r7b": (
        standard(32, 4096, 32, num_key_value_heads=8, sliding_window=4096, sliding_window_pattern=4,
                 model_type="cohere2"),
        (32, 8, 128, 128), "8 full, 24 sliding 4k"),
    "exaone-4-32b": (
        standard(40, 5120, 64, num_key_value_heads=8, head_dim=128, sliding_window=4096,
                 sliding_window_pattern="LLLG", model_type="exaone4"),
        (40, 8, 128, 128), "16 full, 48 sliding 4k"),
    "qwen2.5-omni": (
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": standard(
            28, 3584, 28, num_key_value_heads=4, sliding_window=32768, use_sliding_window=False,
            model_type="qwen2_5_omni_text")}},
        (28, 4, 128, 128), "28 full"),
    "internvl2.5-8b": (
        {"model_type": "internvl_chat", "llm_config": standard(
            32, 4096, 32, num_key_value_heads=8, model_type="internlm2")},
        (32, 8, 128, 128), "32 full"),
    "t5-11b": (
        {"num_heads": 128, "d_model": 1024, "d_kv": 128, "num_layers": 24, "model_type": "t5",
         "num_decoder_layers": 24, "is_encoder_decoder": True},
        (128, 128, 128, 128), "24 full"),
    "bart, with a smaller encoder": (
        {"d_model": 1024, "decoder_layers": 12, "decoder_attention_heads": 16,
         "num_hidden_layers": 6, "encoder_layers": 6, "encoder_attention_heads": 8,
         "is_encoder_decoder": True, "model_type": "bart"},
        (16, 16, 64, 64), "12 full"),
    # families that the list above does not have
    "mistral-7b-v0.1": (
        standard(32, 4096, 32, num_key_value_heads=8, sliding_window=4096, model_type="mistral"),
        (32, 8, 128, 128), "32 sliding 4k"),
    "mistral-7b-v0.3": (
        standard(32, 4096, 32, num_key_value_heads=8, sliding_window=None, model_type="mistral"),
        (32, 8, 128, 128), "32 full"),
    "qwen2, some layers full": (
        standard(28, 3584, 32, num_key_value_heads=4, sliding_window=4096, use_sliding_window=True,
                 max_window_layers=28, model_type="qwen2"),
        (28, 4, 128, 128), "28 full, 4 sliding 4k"),
    "bloom": (
        {"n_head": 112, "n_embed": 14336, "n_layer": 70, "model_type": "bloom"},
        (112, 112, 128, 128), "70 full"),
    "gpt-neox-20b": (standard(64, 6144, 44, model_type="gpt_neox"), (64, 64, 96, 96), "44 full"),
    "dbrx": (
        {"n_heads": 48, "d_model": 6144, "n_layers": 40, "attn_config": {"kv_n_heads": 8},
         "model_type": "dbrx"},
        (48, 8, 128, 128), "40 full"),
    "jamba-v0.1": (
        standard(32, 4096, 32, num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4,
                 model_type="jamba"),
        (32, 8, 128, 128), "4 full, 28 linear"),
    "gpt-neo-1.3b": (
        {"num_heads": 16, "hidden_size": 2048, "num_layers": 24, "window_size": 256,
         "attention_types": [[["global", "local"], 12]], "model_type": "gpt_neo"},
        (16, 16, 128, 128), "12 full, 12 sliding 256"),
    "recurrentgemma-2b": (
        standard(10, 2560, 26, num_key_value_heads=1, attention_window_size=2048,
                 block_types=["recurrent", "recurrent", "attention"],
                 model_type="recurrent_gemma"),
        (10, 1, 256, 256), "8 sliding 2k, 18 linear"),
    "kimi-linear-48b": (
        standard(32, 2304, 27, v_head_dim=128, **mla(128, 64), model_type="kimi_linear",
                 linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                                     "kda_layers": [n for n in range(1, 27) if n % 4]}),
        (32, 32, 192, 128), "7 full, 20 linear"),
    "mimo-v2-flash": (
        standard(64, 4096, 12, num_key_value_heads=4, head_dim=192, v_head_dim=128,
                 hybrid_layer_pattern=[0, 1, 1, 1, 1, 0] + [1] * 5 + [0], sliding_window=129,
                 swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192,
                 swa_v_head_dim=128, model_type="mimo_v2_flash"),
        (64, 4, 192, 128),
        "3 full, 9 sliding 129"),
    "lfm2-1.2b": (
        standard(32, 2048, 16, num_key_value_heads=8, full_attn_idxs=[2, 5, 8, 10, 12, 14],
                 model_type="lfm2"),
        (32, 8, 64, 64), "6 full, 10 linear"),
}  # fmt: skip


def read(config: dict[str, Any], filled: dict[str, Any] | None = None) -> ModelShape:
    return parse_config(config, "mine", "mine.json", filled)


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_shape_and_the_layers_of_the_models_code(name: str) -> None:
    config, shape, layers = FILES[name]
    m = read(config)
    assert (m.heads, m.kv_heads, m.head_dim, m.v_head_dim) == shape
    assert describe_layers(m.kinds) == layers
    assert m.layers == sum(one.layers for one in m.kinds)
    assert [note for note in m.notes if "not read" in note or "not known" in note] == []


def test_kinds_of_layers_have_their_own_kv_heads_and_head_dims() -> None:
    kinds = {n: [(one.kv_heads, one.head_dim) for one in read(FILES[n][0]).kinds] for n in FILES}
    assert {n: shapes for n, shapes in kinds.items() if len({*shapes} - {(0, 0)}) > 1} == {
        "nemotron-nas": [(8, 128), (4, 128), (0, 0)], "gemma-4-26b-a4b": [(2, 512), (8, 256)],
        "gemma 4, keys apart from values": [(2, 512), (2, 256)],
        "gemma-4-e2b, whose last 20 layers read the caches of others":
            [(1, 512), (1, 256), (1, 256), (1, 512)],
        "mimo-v2-flash": [(4, 192), (8, 192)],
    }  # fmt: skip


def test_the_classes_of_transformers_change_no_shape(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    known = 0
    for name, (config, _, _) in FILES.items():
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        try:
            own = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (ValueError, TypeError, KeyError):
            continue  # transformers refuses the file or has no such model
        known += 1
        m = read(config, json.loads(own.to_json_string(use_diff=False)))
        assert (name, m.kinds) == (name, read(config).kinds)
        assert (name, m.notes) == (name, read(config).notes)
    assert known > len(FILES) / 2


def test_defaults_of_model_types_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    sizes = standard(32, 4096, 48, sliding_window=64)
    compared = 0
    types = load_table("model_types.yaml")
    for model_type in types.keys() & set(mapping) - {"mamba2", "xlstm", "deepseek_v4"}:
        # transformers 4.53 has a list for each of its 35 layers, and takes no other number
        own_sizes = sizes | ({"num_hidden_layers": 35} if "gemma3n" in model_type else {})
        if "index_topk" in types[model_type].get("defaults", {}):
            own_sizes["sliding_window"] = None
        config = {**own_sizes, "model_type": model_type}
        own = mapping[model_type](**own_sizes)
        filled = json.loads(own.to_json_string(use_diff=False))
        assert (model_type, read(config).kinds) == (model_type, read(config, filled).kinds)
        compared += 1
    assert compared > 10


def test_windows_on_both_sides_have_no_mask() -> None:
    modernbert = read(FILES["modernbert-base"][0])
    with pytest.raises(ConfigError, match="has no sliding layers whose mask is known here"):
        modernbert.of_layer("sliding")
    assert read(FILES["llama-4-scout"][0]).of_layer("chunked").mask == "chunked:8192"


def test_the_class_of_transformers_gives_what_a_file_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    with pytest.raises(ConfigError, match="it has no num_hidden_layers"):
        read(config)
    path.write_text(json.dumps(config))
    monkeypatch.undo()  # transformers counts again
    m = load_model(str(path))
    assert (m.heads, m.hidden_size, m.layers) == (32, 4096, 32)
    assert (
        "the file has no num_hidden_layers, num_attention_heads, hidden_size; its class of "
        "transformers gives it" in m.notes
    )
    monkeypatch.setattr(models, "_CLASS_PROGRAM", "print('no JSON')")
    path.write_text(json.dumps(standard(4, 64, 2)))
    assert load_model(str(path)).heads == 4


@pytest.mark.parametrize(
    ("changes", "shape"),
    [({"use_mla": False, "v_head_dim": 64, **mla(64, 32)}, (24, 8, 128, 128)),
     ({"use_mla": True, "v_head_dim": 64, **mla(64, 32)}, (24, 24, 96, 64)),
     ({"multi_query_attention": False}, (24, 24, 128, 128)),
     ({"num_hidden_layers": 1, "per_layer_config": {"00": {"head_dim": 64}}}, (24, 8, 64, 64))],
)  # fmt: skip
def test_a_switch_overrules_other_keys(changes: Any, shape: tuple[int, ...]) -> None:
    m = read({**LLAMA_3B, **changes})
    assert (m.heads, m.kv_heads, m.head_dim, m.v_head_dim) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"layer_types": ["full_attention"] * 27},
      "its num_hidden_layers 28 contradicts its length of layer_types 27; keep one of them"),
     ({"multi_query": True}, "its multi_query True contradicts its num_key_value_heads 8"),
     ({"n_head": 12}, "its num_attention_heads 24 contradicts its n_head 12"),
     ({"text_config": {"num_key_value_heads": 4}},
      "its num_key_value_heads 8 contradicts its text_config.num_key_value_heads 4"),
     ({"layer_types": ["sliding_attention"] * 28}, "it has sliding layers, but no sliding_window"),
     ({"num_key_value_heads": None, "num_kv_heads": [2, 4]},
      r"its num_kv_heads \[2, 4\] is not a whole number from 1 up"),
     ({"sliding_window": 9, "max_window_layers": "all"},
      r"a key of its attention has a value of a wrong type \(TypeError"),
     ({"layer_types": ["mamba"] * 28}, r"no layer with attention that is known here \(28 linear\)"),
     ({"compress_ratios": [4, 128] * 14}, r"attention that is known here \(28 compressed\)"),
     ({"layer_types": ["hybrid"] * 28}, r"attention that is known here \(28 hybrid\)")],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**LLAMA_3B, **changes})


@pytest.mark.parametrize(
    ("changes", "note"),
    [({"attention_span": 512}, "keys that sound like attention and are not read: attention_span"),
     ({"layer_types": ["full_attention"] * 27 + ["spectral"]},
      "layers of kind 'spectral' (1) are not known here"),
     ({"num_kv_shared_layers": 10},
      "its last 10 layers read the caches of earlier ones; a step of decoding leaves them out"),
     ({"text_config": {"vocab_size": 9}}, "its language model is under text_config"),
     ({"index_topk": 64},
      "each query sees the 64 keys that an indexer picks; the workload sees all, and leaves "
      "out the indexer")],
)  # fmt: skip
def test_what_a_workload_leaves_out_is_a_note(changes: dict[str, Any], note: str) -> None:
    assert note not in read(LLAMA_3B).notes
    assert note in read({**LLAMA_3B, **changes}).notes
