from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from helpers.gguf_files import gguf_name, permuted, write_gguf
from helpers.models import PagedDriver, hf_logits, random_ids, tiny_hf_model

from octavo.errors import ModelError, WeightsError
from octavo.gguf_file import GGUFFile
from octavo.models.config import load_config
from octavo.models.registry import load_model
from octavo.models.source import resolve_model
from octavo.models.weights.gguf import GGUFCheckpoint
from octavo.models.weights.gguf_config import config_from_gguf

IDS = random_ids(21)
Types = gguf.GGMLQuantizationType


def logits_of(path: str) -> torch.Tensor:
    return PagedDriver(load_model(path)).step({"a": IDS})["a"]


# transformers#31788, vllm-metal#480: the reorder is undone for llama only, with each one's own head count.
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_rows_of_q_and_k_come_back_in_order(arch: str, tmp_path: Path) -> None:
    hf = tiny_hf_model(arch, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    state = hf.state_dict()
    for name, rows in (("q", 16), ("k", 8)):
        weight = state[f"model.layers.0.self_attn.{name}_proj.weight"]
        weight.copy_(torch.arange(rows, dtype=torch.float32)[:, None].expand_as(weight))
    path = tmp_path / "model.gguf"
    write_gguf(path, hf)
    with GGUFFile(path) as file:
        stored = file.tensors["blk.0.attn_k.weight"]
        values = np.frombuffer(file.read(stored.offset, 8 * 16 * 4), np.float32).reshape(8, 16)[:, 0].tolist()
        assert values == ([0, 2, 1, 3, 4, 6, 5, 7] if arch == "llama" else [0, 1, 2, 3, 4, 5, 6, 7])
        checkpoint = GGUFCheckpoint(file, config_from_gguf(file))
        for name, rows in (("q", 16), ("k", 8)):
            out = torch.empty(rows, 16)
            checkpoint.read_into(f"model.layers.0.self_attn.{name}_proj.weight", out)
            assert out[:, 0].tolist() == list(range(rows))
        checkpoint.close()


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 10}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"head_dim": 8}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_logits_equal_transformers(arch: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    hf = tiny_hf_model(arch, **overrides)
    skip = ("lm_head.weight",) if overrides.get("tie_word_embeddings") else ()
    path = write_gguf(tmp_path / "model.gguf", hf, skip=skip)
    torch.testing.assert_close(logits_of(path), hf_logits(hf, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "kind", [Types.F16, Types.BF16, Types.Q8_0, Types.Q4_0, Types.Q4_1, Types.Q5_1, Types.Q6_K]
)
def test_every_quantised_type_is_read_as_the_gguf_package_reads_it(kind: Types, tmp_path: Path) -> None:
    wide = 256 if kind == Types.Q6_K else 64
    hf = tiny_hf_model(
        "llama",
        hidden_size=wide,
        intermediate_size=wide,
        num_attention_heads=4,
        head_dim=wide // 4,
        num_hidden_layers=1,
    )
    if kind == Types.Q6_K:  # the package reads this type and cannot write it
        blocks = np.random.default_rng(0).integers(0, 255, (wide, 210), dtype=np.uint8)
        blocks[:, -2:] = np.full((wide, 1), 0.01, np.float16).view(np.uint8)
        packed: Any = {256: blocks, 128: blocks[:128], 101: blocks[:101]}
    else:
        packed = None

    def pack(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return packed[array.shape[0]] if packed is not None else quantize(array, kind)

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, torch.Tensor] = {}
    for name, value in hf.state_dict().items():
        if value.dim() == 2:
            raw = pack(value.numpy())
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
            values = dequantize(raw, kind)
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
            if heads:  # what is in the file is in file order
                halves = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2)
                values = halves.reshape(values.shape)
            expected[name] = torch.from_numpy(np.ascontiguousarray(values))
        else:
            writer.add_tensor(gguf_name(name), value.numpy())
            expected[name] = value
    config = hf.config
    writer.add_embedding_length(wide)
    writer.add_feed_forward_length(wide)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        checkpoint = GGUFCheckpoint(file, config_from_gguf(file))
        assert checkpoint.shapes == {name: tuple(value.shape) for name, value in expected.items()}
        for name, value in expected.items():
            out = torch.full(value.shape, torch.nan)
            checkpoint.read_into(name, out)
            assert torch.equal(out, value), name
        checkpoint.close()


@pytest.mark.parametrize("chunk", [1, 100, 10_000])
def test_chunks_do_not_change_the_values(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.weights.gguf._CHUNK_VALUES", chunk)
    hf = tiny_hf_model("llama", attention_bias=True)
    path = write_gguf(tmp_path / "model.gguf", hf)
    torch.testing.assert_close(logits_of(path), hf_logits(hf, IDS), rtol=0, atol=1e-4)


def test_the_config_comes_from_the_metadata(tmp_path: Path) -> None:
    hf = tiny_hf_model("llama", rms_norm_eps=1e-5, rope_parameters={"rope_theta": 1e6})
    loaded = load_model(write_gguf(tmp_path / "model.gguf", hf))
    config = loaded.config
    assert (config.model_type, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 3, 6, 2)
    assert (config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size) == (
        48,
        80,
        16,
        101,
    )
    assert (config.max_position_embeddings, config.rope.theta) == (64, 1e6)
    assert math.isclose(config.norm_eps, 1e-5, rel_tol=1e-6)
    assert config.sliding_window == (None,) * 3
    assert loaded.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert loaded.source.kind == "gguf"


# In GGUF an absent key length means hidden / heads, also for qwen3, whose Hugging Face default is 128.
def test_head_dim_without_key_length(tmp_path: Path) -> None:
    hf = tiny_hf_model("qwen3", head_dim=8)
    path = tmp_path / "model.gguf"
    write_gguf(path, hf)
    data = path.read_bytes().replace(b"attention.key_length", b"attention.kex_length")
    path.write_bytes(data.replace(b"attention.value_length", b"attention.valux_length"))
    torch.testing.assert_close(logits_of(str(path)), hf_logits(hf, IDS), rtol=0, atol=1e-4)


ROPE = {
    "linear": (
        lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), w.add_rope_scaling_factor(3.0)),
        {"rope_type": "linear", "factor": 3.0},
    ),
    "yarn": (
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            w.add_rope_scaling_factor(4.0),
            w.add_rope_scaling_orig_ctx_len(16),
        ),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "yarn-attention-factor": (
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            w.add_rope_scaling_factor(4.0),
            w.add_rope_scaling_orig_ctx_len(16),
            w.add_rope_scaling_attn_factors(0.5),
        ),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0)),
        },
    ),
    "none": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE), {"rope_type": "default"}),
    "llama3": (
        lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 1.5, 2, 4, 8, 8], np.float32)),
        {"rope_type": "default"},
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rope_scaling_of_the_metadata(name: str, tmp_path: Path) -> None:
    edit, parameters = ROPE[name]
    hf = tiny_hf_model("llama", rope_parameters={"rope_theta": 500.0, **parameters})
    path = write_gguf(tmp_path / "model.gguf", hf, edit=edit)
    if name == "llama3":
        hf.model.rotary_emb.inv_freq /= torch.tensor([1, 1, 1, 1.5, 2, 4, 8, 8])
    torch.testing.assert_close(logits_of(path), hf_logits(hf, IDS), rtol=0, atol=1e-4)


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    hf = tiny_hf_model("mistral", sliding_window=6)
    path = write_gguf(tmp_path / "model.gguf", hf, arch="llama", edit=lambda w: w.add_sliding_window(6))
    assert load_config(resolve_model(path)).sliding_window == (6,) * 3
    torch.testing.assert_close(logits_of(path), hf_logits(hf, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("same", [True, False])
def test_an_output_equal_to_the_embedding_is_tied(same: bool, tmp_path: Path) -> None:
    hf = tiny_hf_model("llama")
    if same:
        hf.lm_head.weight.data.copy_(hf.model.embed_tokens.weight)
    path = write_gguf(tmp_path / "model.gguf", hf)
    model = load_model(path).model
    assert (model.head.weight is model.embedding.weight) == same


UNSUPPORTED = {
    "partial": (lambda w: w.add_uint32("split.count", 2), "is one of 2 parts of a split GGUF"),
    "experts": (lambda w: w.add_expert_count(8), "experts in model_type 'llama' are not supported"),
    "longrope": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "unknown rope scaling type 'longrope'; known: none, linear, yarn",
    ),
    "extrapolation": (
        lambda w: w.add_rope_scaling_yarn_ext_factor(0.5),
        "yarn_ext_factor = 0.5 is not supported",
    ),
    "tensor": (
        lambda w: w.add_tensor("blk.0.ssm_a.weight", np.zeros(4, np.float32)),
        r"no place for: blk.0.ssm_a.weight",
    ),
    "factors": (
        lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)),
        r"tensor rope_freqs.weight: expected \(8,\) in F32, got \(3,\)",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_unsupported_is_named(name: str, tmp_path: Path) -> None:
    edit, message = UNSUPPORTED[name]
    path = write_gguf(tmp_path / "model.gguf", tiny_hf_model("llama", num_hidden_layers=1), edit=edit)
    with pytest.raises((ModelError, WeightsError), match=message):
        load_model(path)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_hf_model("llama"), arch="qwen35")
    with pytest.raises(
        ModelError, match=r"unknown GGUF architecture 'qwen35' \(did you mean 'qwen3'\?\); known: llama, "
    ):
        load_model(path)


def test_missing_metadata_and_missing_tensors(tmp_path: Path) -> None:
    hf = tiny_hf_model("llama", num_hidden_layers=1)
    bare = write_gguf(tmp_path / "bare.gguf", hf, metadata=False)
    with pytest.raises(ModelError, match="hidden_size is missing"):
        load_model(bare)
    headless = write_gguf(tmp_path / "headless.gguf", hf, skip=("model.embed_tokens.weight",))
    with pytest.raises(WeightsError, match=r"tensor token_embd.weight is missing"):
        load_model(headless)
    gappy = write_gguf(tmp_path / "gappy.gguf", hf, skip=("model.layers.0.mlp.up_proj.weight",))
    with pytest.raises(WeightsError, match=r"1 tensor is missing .*: model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(gappy)


def test_every_truncation_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_hf_model("llama", num_hidden_layers=1))
    whole = path.read_bytes()
    with GGUFFile(path) as file:
        header_end = min(tensor.offset for tensor in file.tensors.values())
    cuts = [*range(4, header_end, 97), header_end, header_end + 1, len(whole) - 40]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(WeightsError, match="truncated"):
            load_model(str(path))
    path.write_bytes(whole)
    load_model(str(path))


def test_a_corrupt_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_hf_model("llama", num_hidden_layers=1))
    whole = path.read_bytes()
    with GGUFFile(path) as file:
        header_end = min(tensor.offset for tensor in file.tensors.values())
    random = np.random.default_rng(0)
    num_errors = 0
    for _ in range(200):
        broken = bytearray(whole)
        for at in random.integers(4, header_end, 3):
            broken[at] = random.integers(256)
        path.write_bytes(broken)
        try:
            with GGUFFile(path) as file:
                GGUFCheckpoint(file, config_from_gguf(file)).close()
        except (ModelError, WeightsError):
            num_errors += 1
    assert num_errors > 50


@pytest.mark.parametrize(
    ("at", "value", "kind", "message"),
    [
        (4, struct.pack("<I", 1), ModelError, "GGUF version 1 is not supported"),
        (4, struct.pack(">I", 3), ModelError, "GGUF version 50331648 is not supported"),
        (8, struct.pack("<Q", 2**60), WeightsError, "truncated or corrupt"),
        (16, struct.pack("<Q", 2**60), WeightsError, "truncated or corrupt"),
        (24, struct.pack("<Q", 2**63), WeightsError, "9223372036854775808 bytes wanted at offset 32"),
    ],
)
def test_a_broken_field(at: int, value: bytes, kind: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_hf_model("llama", num_hidden_layers=1))
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(kind, match=message):
        load_model(str(path))


def test_the_config_needs_no_torch(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_hf_model("qwen3"))
    code = (
        "import sys\nfrom octavo.models.source import resolve_model\n"
        "from octavo.models.config import load_config\n"
        f"print(load_config(resolve_model({path!r})).head_dim, 'torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["16", "False"]


def test_the_helper_permutes_as_a_worked_example_says() -> None:
    assert permuted(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
