"""Models on disk: what is read is what was written, and nothing bad is believed."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.worker.tiny import (
    LLAMA3_SCALING,
    tiny_weights,
    write_gguf_model,
    write_hf_model,
)
from text.models import resolve
from worker.config import RopeScaling
from worker.files.architecture import rope_factor
from worker.loader import Checkpoint, ModelError, open_model

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(checkpoint.tensors(dtype, "cpu", lambda _: None))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# What is read


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_safetensors_and_gguf_hold_the_same_model(tmp_path, arch, tied):
    config = write_hf_model(tmp_path / "hf", arch=arch, tied=tied)
    write_gguf_model(tmp_path / "model.gguf", arch=arch, tied=tied)
    hf, ggml = open_model(tmp_path / "hf"), open_model(tmp_path / "model.gguf")
    assert hf.config == config
    assert (hf.source, ggml.source) == ("safetensors", "gguf")
    if arch != "mistral":  # llama.cpp has no name of its own for it
        assert ggml.config == config
    assert_same(load(hf), tiny_weights(config))
    assert_same(load(ggml), tiny_weights(config))


def test_a_directory_with_one_gguf_file_is_a_model(tmp_path):
    config = write_gguf_model(tmp_path / "model.gguf")
    assert open_model(tmp_path).config == config


def test_shards_are_read_as_one_model(tmp_path):
    config = write_hf_model(tmp_path, sharded=True)
    assert_same(load(open_model(tmp_path)), tiny_weights(config))


@pytest.mark.parametrize("transformers", [4, 5])
def test_rotary_settings_are_read_as_either_transformers_writes_them(tmp_path, transformers):
    config = write_hf_model(tmp_path, rope_scaling=LLAMA3_SCALING, transformers=transformers)
    assert open_model(tmp_path).config == config
    assert config.rope_scaling == LLAMA3_SCALING


def test_the_rotary_base_may_stand_beside_the_parameters(tmp_path):
    write_hf_model(tmp_path, changes={"rope_parameters": {"rope_type": "default"}})
    edit_config(tmp_path, rope_theta=5e5)
    assert open_model(tmp_path).config.rope_theta == 5e5


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    write_gguf_model(tmp_path / "m.gguf")
    checkpoint = open_model(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-100])
    with pytest.raises(ModelError, match="became shorter"):
        load(checkpoint)
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load(checkpoint)


def test_linear_scaling_divides_every_frequency(tmp_path):
    write_hf_model(tmp_path, changes={"rope_scaling": {"type": "linear", "factor": 4.0}})
    scaling = open_model(tmp_path).config.rope_scaling
    assert scaling is not None
    assert {rope_factor(scaling, 2 * np.pi * 10000 ** (i / 8)) for i in range(8)} == {4.0}


@pytest.mark.parametrize("scaling", [RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32, 1, 4, 8192)])
def test_llama_3_scaling_is_found_in_a_gguf_file(tmp_path, scaling):
    config = write_gguf_model(
        tmp_path / "m.gguf", hidden_size=256, rope_scaling=scaling, num_layers=1
    )
    found = open_model(tmp_path / "m.gguf").config.rope_scaling
    assert config.head_dim == 64
    assert found is not None
    assert found.factor == scaling.factor
    for wavelength in (7, 1000, 2500, 4000, 8000, 9000, 100_000):
        wanted = rope_factor(scaling, wavelength)
        assert rope_factor(found, wavelength) == pytest.approx(wanted, rel=1e-3)


def test_frequencies_that_follow_no_known_rule_are_refused(tmp_path):
    # A head this small has no frequency between Llama 3's bounds to find them by.
    write_gguf_model(tmp_path / "m.gguf", rope_scaling=RopeScaling(8.0, 1.0, 1.001, 300))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        open_model(tmp_path / "m.gguf")


def test_tensors_come_in_the_type_asked_for(tmp_path):
    config = write_hf_model(tmp_path / "hf", dtype=torch.float16)
    write_gguf_model(tmp_path / "m.gguf", quantization="F16")
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        for name, value in load(open_model(path), torch.bfloat16).items():
            assert value.dtype == torch.bfloat16
            wanted = tiny_weights(config)[name]
            torch.testing.assert_close(value.float(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_progress_adds_up_to_the_size(tmp_path, kind):
    path = tmp_path / "model.gguf"
    if kind == "hf":
        path = tmp_path / "hf"
        write_hf_model(path, dtype=torch.bfloat16, tied=False)
    else:
        write_gguf_model(path, quantization="Q8_0")
    checkpoint = open_model(path)
    told: list[int] = []
    names = [name for name, _ in checkpoint.tensors(torch.float32, "cpu", told.append)]
    assert sum(told) == checkpoint.num_bytes
    assert len(told) >= len(names)


def test_a_tied_model_may_carry_its_head_once_more(tmp_path):
    config = write_hf_model(tmp_path, tied=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, tmp_path / "model.safetensors")
    assert_same(load(open_model(tmp_path)), tiny_weights(config))


QUANTIZATIONS = [
    *("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
]


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_quantised_tensors_are_what_the_gguf_package_reads(tmp_path, kind):
    path = tmp_path / "m.gguf"
    write_gguf_model(path, arch="qwen3", hidden_size=256, num_layers=1, quantization=kind)
    checkpoint = open_model(path)
    found = load(checkpoint)
    assert checkpoint.quantization == kind
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, ggml_name in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ]:
        tensor = reference[ggml_name]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found[name].numpy(), wanted.reshape(found[name].shape))


def test_smollm2_is_read_as_its_blocks_say():
    checkpoint = open_model(resolve("smollm2-135m"))
    assert checkpoint.config.num_layers == 30
    assert checkpoint.quantization == "Q4_1"
    tensors = checkpoint.tensors(torch.float32, "cpu", lambda _: None)
    name, embeddings = next(tensors)
    assert name == "model.embed_tokens.weight"
    # Q8_0 by its definition: a 16-bit scale, then 32 signed bytes.
    (path,) = resolve("smollm2-135m").glob("*.gguf")
    with path.open("rb") as file:
        file.seek(-checkpoint.num_bytes, 2)
        raw = np.frombuffer(file.read(34 * 18), dtype=np.uint8).reshape(18, 34)
    scales = raw[:, :2].copy().view(np.float16).astype(np.float32)
    wanted = raw[:, 2:].view(np.int8) * scales
    np.testing.assert_array_equal(embeddings[0].numpy(), wanted.reshape(-1))


# What is refused


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("llama", {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ("llama", {"architectures": []}, "architectures"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
        ("mistral", {"sliding_window": 128}, "sliding attention window of 128"),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, "sliding"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of the head"),
        ("llama", {"rope_parameters": {"full_attention": {"factor": 2}}}, "layer to layer"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantised"),
        ("llama", {"hidden_size": float("nan")}, "hidden_size"),
        ("llama", {"hidden_size": "64"}, "hidden_size"),
        ("llama", {"hidden_size": -64}, "hidden_size"),
        ("llama", {"hidden_size": 10**400}, "hidden_size"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ("llama", {"rope_theta": 0}, "rope_theta"),
        ("llama", {"num_key_value_heads": 3}, "evenly"),
        ("llama", {"head_dim": 15}, "odd"),
        ("llama", {"vocab_size": 321}, r"shape \(320, 64\), but must have \(321, 64\)"),
        ("llama", {"num_hidden_layers": 3}, "lacks the tensor model.layers.2"),
        ("llama", {"num_hidden_layers": 1}, "has the tensor 'model.layers.1"),
        ("llama", {"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused(tmp_path, arch, changes, message):
    write_hf_model(tmp_path, arch=arch)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        open_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},  # longer than the context: never in force
        {"sliding_window": None},
        {"layer_types": ["full_attention", "full_attention"], "sliding_window": 128},
        {"rope_scaling": {"rope_type": "default"}},
        {"num_key_value_heads": 2, "use_cache": True, "anything": [1, 2]},
    ],
)
def test_harmless_settings_are_accepted(tmp_path, changes):
    write_hf_model(tmp_path, arch="mistral")
    edit_config(tmp_path, **changes)
    open_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"architectures":' * 100_000, "nested too deeply|not valid JSON"),
        (b'{"hidden_size":' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_broken_json_is_one_clear_line(tmp_path, content, message):
    write_hf_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path)


def test_a_missing_path_and_an_empty_directory_are_told_apart(tmp_path):
    with pytest.raises(ModelError, match="no such model"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        open_model(tmp_path)


def test_two_gguf_files_in_a_directory_must_be_chosen_from(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf_model(tmp_path / name)
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        open_model(tmp_path)


def test_pickled_weights_are_never_read(tmp_path):
    write_hf_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7, "\0", ""]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path, shard):
    write_hf_model(tmp_path / "model", sharded=True)
    write_hf_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ModelError, match="not a plain file name"):
        open_model(tmp_path / "model")


def test_a_missing_shard_is_named(tmp_path):
    write_hf_model(tmp_path, sharded=True)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_model(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_hf_model(tmp_path, sharded=True)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"model.embed_tokens.weight": torch.ones(1)}, second)
    with pytest.raises(ModelError, match=r"repeats the tensor model\.embed_tokens\.weight"):
        open_model(tmp_path)


def test_integer_weights_are_refused(tmp_path):
    write_hf_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight as I8"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 128}, "sliding"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"split.count": 2}, "one of several parts"),
        ({"llama.block_count": 3}, "lacks the tensor model.layers.2"),
        ({"llama.block_count": "2"}, "block_count"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.embedding_length": 128}, "shape"),
    ],
)
def test_gguf_metadata_that_cannot_be_served_is_refused(tmp_path, changes, message):
    write_gguf_model(tmp_path / "m.gguf", changes=changes)
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path / "m.gguf")


def test_a_file_that_is_no_model_is_refused(tmp_path):
    for content, message in ((b"", "empty"), (b"PK\3\4" + bytes(100), "not a GGUF file")):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            open_model(tmp_path / "m.gguf")


def header(*, tensors: int = 0, keys: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


TENSOR = string(b"token_embd.weight")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "version 1"),
        (header(version=0x03000000), "little-endian"),
        (header(tensors=2**63), "claims"),
        (header(keys=2**40), "claims"),
        (header(keys=1, body=string(b"k" * 200)[:100]), "cut off"),
        (header(keys=1, body=struct.pack("<Q", 2**62)), "cut off"),
        (header(keys=1, body=string(b"\xff") + struct.pack("<I", 4)), "not UTF-8"),
        (header(keys=1, body=string(b"k") + struct.pack("<I", 99)), "value type 99"),
        (header(keys=1, body=string(b"k") + struct.pack("<IIQ", 9, 8, 2**60)), "claims"),
        (header(keys=1, body=string(b"k") + struct.pack("<IIQ", 9, 9, 1)), "value type 9"),
        (header(keys=2, body=(string(b"k") + struct.pack("<IB", 0, 1)) * 2), "two values of k"),
        (header(tensors=1, body=TENSOR + struct.pack("<I", 2**31)), "dimensions"),
        (header(tensors=1, body=TENSOR + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), "shape"),
        (header(tensors=1, body=TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0)), "shape"),
        (header(tensors=1, body=TENSOR + struct.pack("<IQIQ", 1, 8, 0, 2**62)), "cut off"),
        (header(tensors=1, body=TENSOR + struct.pack("<IQIQ", 1, 8, 999, 0)), "type 999"),
        (header(tensors=1, body=TENSOR + struct.pack("<IQIQ", 1, 33, 8, 0)), "shape"),
    ],
)
def test_hostile_gguf_headers_are_refused_at_once(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content.ljust(120, b"\0"))
    started = time.perf_counter()
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path / "m.gguf")
    assert time.perf_counter() - started < 1


# What happens to damaged files


def opens_or_refuses(path: Path) -> None:
    """Opening and reading it works, or says why not: anything else is a defect."""
    try:
        checkpoint = open_model(path)
        checkpoint.tokenizer()
        load(checkpoint)
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def small_models(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_hf_model(directory / "hf", num_layers=1, hidden_size=16, sharded=True)
    write_gguf_model(directory / "m.gguf", num_layers=1, hidden_size=32, quantization="Q8_0")
    return directory


edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "zero", "ones", "cut", "insert"])),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, edits: list[tuple[float, str]]) -> bytes:
    for place, kind in edits:
        at = int(place * len(data))
        change: dict[str, Callable[[bytes], bytes]] = {
            "flip": lambda rest: bytes([rest[0] ^ 0x20]) + rest[1:] if rest else rest,
            "zero": lambda rest: bytes(8) + rest[8:],
            "ones": lambda rest: b"\xff" * 8 + rest[8:],
            "cut": lambda _: b"",
            "insert": lambda rest: b'[{\x00"9' + rest,
        }
        data = data[:at] + change[kind](data[at:])
    return data


@given(edits=edits, header_only=st.booleans())
@settings(max_examples=150, deadline=None)
def test_damaged_gguf_files_are_refused_or_read(small_models, edits, header_only):
    data = (small_models / "m.gguf").read_bytes()
    if header_only:  # most of the file is numbers, in which any bytes are fine
        edits = [(place * 9000 / len(data), kind) for place, kind in edits]
    path = small_models / "damaged.gguf"
    path.write_bytes(damaged(data, edits))
    opens_or_refuses(path)


HF_FILES = [
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@given(name=st.sampled_from(HF_FILES), edits=edits, at_start=st.booleans())
@settings(max_examples=200, deadline=None)
def test_damaged_directories_are_refused_or_read(small_models, name, edits, at_start):
    file = small_models / "hf" / name
    original = file.read_bytes()
    if at_start:
        edits = [(place * min(1, 1000 / len(original)), kind) for place, kind in edits]
    try:
        file.write_bytes(damaged(original, edits))
        opens_or_refuses(small_models / "hf")
    finally:
        file.write_bytes(original)
