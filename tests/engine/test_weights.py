"""Test that any error in a model directory is reported in one clear line, and that no code in it is ever run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_memory import log_table
from engine.models.families import read_model_config
from engine.models.load import load_model
from engine.models.spec import Rope
from engine.weights import INDEX, Checkpoint, fingerprint, text_name
from router.text.model_files import read_model
from shared import model_files
from shared.model_files import DEMO_MODEL, MAX_CONFIG_BYTES, OTHER_DEMO_MODELS, resolve
from tests.engine.build import CPU
from tests.engine.checkpoint_files import CONFIG, entry, raw


def test_progress_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("engine.weights.PROGRESS_S", 0.0)
    save_file({"a": torch.ones(1000), "b": torch.ones(3000)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path, CPU)
    with caplog.at_level("INFO", "baton.engine"):
        checkpoint.take("a", 1000)
        checkpoint.take("b", 3000)
    assert [record.getMessage()[:7] for record in caplog.records] == ["read 25", "read 99"]


def test_each_row_of_the_memory_table_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "baton.engine"):
        log_table({"weights": "7 MiB in files", "longest request": "8,192 tokens"})
    assert [record.getMessage() for record in caplog.records] == [
        "model: weights          7 MiB in files",
        "model: longest request  8,192 tokens",
    ]


SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.up_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 6),
}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "layer_types": ["full_attention"], "hidden_size_per_layer_input": 0}
VISION: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
# config.json of google/gemma-3-4b-it, without the fields that the text decoder does not use.
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def write_config(where: Path, **changes: Any) -> Path:
    """Write config.json with `changes` applied to CONFIG. A key whose value is `...` is removed."""
    kept = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    (where / "config.json").write_text(json.dumps(kept))
    return where


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors")
    return write_config(tmp_path)


# ---- config.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]: it must be one of .*Qwen3"),
        ({"architectures": ...}, "architectures is missing"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "architectures is .*: models that choose tokens by an index"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "index_topk": 64}, "index_topk is 64: models that choose tokens"),
        (
            GEMMA4 | {"hidden_size_per_layer_input": ...},
            "hidden_size_per_layer_input is missing: Gemma 4 with embeddings",
        ),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2: Gemma 4 with layers that share KV"),
        (GEMMA4 | {"global_head_dim": 20}, "global_head_dim is 20: global layers must have heads of twice the size"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 9}, "kv_lora_rank is 9: it must be even"),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 8, "num_experts_per_tok": 2},
            r"topk_group is missing: the groups must have at least num_experts_per_tok \(2\) experts",
        ),
        ({"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "auto_map .*never run"),
        (
            VISION | {"text_config": {"model_type": "umt5"}},
            r"text_config.model_type is 'umt5': supported are gemma3_text",
        ),
        (VISION | {"text_config": {"model_type": "gemma3_text"}}, "text_config.num_hidden_layers is missing"),
        (VISION | {"text_config": ...}, "model_type is missing: supported are gemma3_text"),
        ({"quantization_config": {"bits": 4}}, "quant_method is missing: .*unquantized"),
        ({"quantization_config": {"quant_method": []}}, r"quant_method is \[\]: .*unquantized"),
        ({"architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": None}, "first_k_dense_replace is None: it"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": [[]]}, r"mlp_layer_types is \[\[\]\]"),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 4, "time_step_limit": []},
            r"time_step_limit is \[\]",
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "hidden_act": "gelu_pytorch_tanh"},
            "hidden_act is 'gelu_pytorch_tanh': only \"silu\" is supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": ...}, "hidden_size is missing: it must be an integer from 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"vocab_size": "11"}, "vocab_size is '11'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads is 3: hidden_size .8. must be"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads is 3: num_attention_heads .4."),
        ({"head_dim": 5}, "head_dim is 5: .*even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}, "rope_parameters.rope_type is 'prop"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": []}, r"rope_scaling is \[\]: it must be an object"),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"type": "yarn"}}, "it differs from rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"eos_token_id": 11}, "eos_token_id is 11: .*below vocab_size"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({**QWEN2, "sliding_window": 0}, "sliding_window is 0"),
        ({**QWEN2, "layer_types": ["full_attention"] * 2}, "layer_types .* 1 layers"),
        ({**QWEN2, "layer_types": ["linear_attention"]}, "layer_types"),
        ({**QWEN2, "max_window_layers": -1}, "max_window_layers is -1"),
    ],
)
def test_a_wrong_config_is_refused_naming_file_key_and_fix(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_model_config(tmp_path)


def test_defaults_and_both_ways_to_write_rope(tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path, num_key_value_heads=...))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 4, 1e-6)
    assert (config.ropes, config.layers[0].mixer.window, config.bos_token_id) == ([Rope()], 0, None)
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2}}
    for changes in (old, new):
        assert read_model_config(write_config(tmp_path, **changes)).ropes == [Rope(500.0, "linear", 2.0)]
    null = read_model_config(write_config(tmp_path, rope_scaling=None, rope_theta=7.0))
    assert null.ropes == [Rope(7.0)]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (0, 0, 0)),
        ({**QWEN2, "use_sliding_window": False}, (0, 0, 0)),
        ({**QWEN2, "max_window_layers": 1}, (0, 4, 4)),
        ({**QWEN2, "max_window_layers": 28}, (0, 0, 0)),
        ({**QWEN2, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (4, 0, 4)),
    ],
)
def test_windows_by_layer(changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path, num_hidden_layers=3, **changes))
    assert tuple(layer.mixer.window for layer in config.layers) == windows


def test_a_config_of_gemma_3_with_images_omits_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    config = read_model_config(tmp_path)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("Gemma3ForCausalLM", 262_208, 34)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.max_position_embeddings, config.eos_token_ids, config.tie_word_embeddings) == (
        131_072,
        (1, 106),
        True,
    )
    assert config.ropes == [Rope(10_000.0), Rope(1_000_000.0, "linear", 8.0)]
    card = read_model(tmp_path, "gemma", 0, 0)
    assert (card.vocab_size, card.max_model_len, card.eos_ids) == (262_208, 131_072, {1, 106})


def test_the_router_reads_the_length_of_older_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 97, "n_positions": 256, "eos_token_id": 2}))
    assert read_model(tmp_path, "gpt2", 0, 0).max_model_len == 256


def test_code_is_not_needed_for_a_supported_architecture(tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    assert read_model_config(write_config(tmp_path, auto_map=auto_map)).num_layers == 1


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.ln_pre.weight", ""),
        ("model.visual.merger.norm.bias", ""),
        ("model.embed_vision.embedding_projection.weight", ""),
        ("multi_modal_projector.norm.weight", ""),
    ],
)
def test_names_of_tensors_in_a_model_of_text_and_images(stored: str, name: str) -> None:
    assert text_name(stored) == name


def test_two_tensors_for_one_name_are_refused(directory: Path) -> None:
    values = json.loads((directory / "config.json").read_text()) | {"model_type": "mistral"}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": values, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    load_model(directory, torch.float32, CPU)
    twice = tensors() | {"language_model.model.norm.weight": torch.ones(8)}
    save_file(twice, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"stored in addition to another tensor for model\.norm\.weight"):
        load_model(directory, torch.float32, CPU)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[2, 3], bos_token_id=[1])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    config = read_model_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 3, 7), 1)
    assert read_model(tmp_path, "m", 0, 0).eos_ids == {2, 3, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is 99"):
        read_model_config(tmp_path)


# ---- tensors ---------------------------------------------------------------------------------------------------


def test_missing_extra_and_wrong_tensors_are_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load_file(file)
    save_file({key: value for key, value in whole.items() if key != name}, file)
    with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
        load_model(directory, torch.float32, CPU)
    save_file({**whole, "model.layers.1.mlp.up_proj.weight": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=r"1 tensors .* not part of the model .*, such as 'model.layers.1"):
        load_model(directory, torch.float32, CPU)
    save_file({**whole, name: torch.ones(8, 6)}, file)
    with pytest.raises(ValueError, match=rf"'{name}' is \[8, 6\], the config needs \[6, 8\]"):
        load_model(directory, torch.float32, CPU)
    save_file({**whole, name: torch.ones(6, 8, dtype=torch.float64)}, file)
    with pytest.raises(ValueError, match=f"'{name}' is F64; supported are F32, BF16, F16"):
        load_model(directory, torch.float32, CPU)


def test_known_leftovers_of_old_files_are_ignored(directory: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**load_file(directory / "model.safetensors"), **extra}, directory / "model.safetensors")
    load_model(write_config(directory, tie_word_embeddings=True), torch.float32, CPU)


def test_a_loaded_model_does_not_change_with_its_file(directory: Path) -> None:
    checkpoint = Checkpoint(directory, CPU)
    taken = checkpoint.take("model.norm.weight", 8)
    before = taken.clone()
    file = directory / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert torch.equal(taken, before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (raw({}, length=2**63), "header too large"),
        (raw(b" " * 2**20), "invalid JSON in header"),
        (raw(b"{nope"), "invalid JSON in header"),
        (raw(b"\xff\xff"), "invalid UTF-8"),
        (raw({"a": entry(0, 8, [2]), "b": entry(12, 16, [1])}, b"\0" * 16), "invalid offset for tensor `b`"),
        (raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12), "invalid offset for tensor `b`"),
        (raw({"a": entry(0, 8, [3])}, b"\0" * 8), "invalid shape"),
        (raw({"a": entry(0, 8, [2**62, 2**62])}, b"\0" * 8), "overflow"),
        (raw({"a": entry(0, 8, [1], "I64")}, b"\0" * 8), "'a' is I64"),
        (raw({"a": entry(0, 8, [2])}, b"\0" * 7), "not fully covered"),
    ],
)
def test_a_malformed_safetensors_file_is_refused(content: bytes, message: str, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_model(directory, torch.float32, CPU)
    assert "model.safetensors" in str(error.value)


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "a.bin", ".."])
def test_shard_names_may_not_leave_the_directory(name: str, directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match="is not a safetensors file in this directory"):
        load_model(directory, torch.float32, CPU)


def test_links_out_of_the_directory_are_refused_except_in_a_hub_snapshot(directory: Path) -> None:
    snapshot, blobs = directory / "snapshots" / "abc", directory / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_config(snapshot)
    (directory / "model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    load_model(snapshot, torch.float32, CPU)
    (directory / "model.safetensors").symlink_to(blobs / "0123")
    with pytest.raises(ValueError, match="is not a safetensors file in this directory"):
        load_model(directory, torch.float32, CPU)


def test_missing_shards_and_duplicate_tensors_are_refused(directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"b\.safetensors: missing, though"):
        load_model(directory, torch.float32, CPU)
    save_file({"model.norm.weight": torch.ones(8)}, directory / "b.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is also in another file"):
        load_model(directory, torch.float32, CPU)
    (directory / INDEX).write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ValueError, match="weight_map must map"):
        load_model(directory, torch.float32, CPU)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(ValueError, match=r"only pickled weights .* use safetensors"):
        load_model(write_config(tmp_path), torch.float32, CPU)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load_model(write_config(tmp_path), torch.float32, CPU)


# ---- finding and recognizing a model ---------------------------------------------------------------------------


def test_a_fingerprint_depends_on_the_content_but_not_on_the_directory(directory: Path, tmp_path_factory: Any) -> None:
    first = fingerprint(directory)
    other = tmp_path_factory.mktemp("other")
    for file in directory.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert fingerprint(other) == first
    weights = other / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fingerprint(other) != first
    weights.write_bytes(content)
    assert fingerprint(other) == first
    write_config(other, rope_theta=9.0)
    assert fingerprint(other) != first


def test_a_directory_resolves_to_itself(directory: Path) -> None:
    assert resolve(str(directory)) == directory


def test_a_demo_model_is_found_by_its_name_in_the_repository_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in OTHER_DEMO_MODELS:
        assert resolve(name) == DEMO_MODEL.with_name(name)
    monkeypatch.setattr(model_files, "DEMO_MODEL", tmp_path / "model")  # does not exist, as in a wheel
    with pytest.raises(ValueError, match="only in Baton's repository; in a checkout, give the directory demo/moe"):
        resolve("moe")
    (tmp_path / "moe").mkdir()
    assert resolve("moe") == Path("moe")  # a directory of that name takes precedence


@pytest.mark.parametrize("model", ["/no/such/place", "./here", "a/b/c", "../x/y", "gpt2", "", "owner/na me"])
def test_a_name_that_is_neither_a_directory_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="neither a directory nor a hub id"):
        resolve(model)


def test_the_error_for_a_hub_id_names_the_missing_package_or_the_failed_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"in the repository: pip install '\.\[hub\]'"):
        resolve("owner/name")
    monkeypatch.undo()
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="'owner/name' is not a local directory, and downloading it failed: "):
        resolve("owner/name")
    (tmp_path / "demo" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'demo/modell' is not a local directory \(did you mean demo/model\?\)"):
        resolve("demo/modell")
