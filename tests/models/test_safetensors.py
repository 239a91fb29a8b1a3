from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model
from safetensors.torch import load_file, save_file

from octavo.errors import WeightsError
from octavo.models.decoder import DecoderCausalLM
from octavo.models.registry import load_model
from octavo.models.weights.safetensors import SafetensorsCheckpoint

IDS = random_ids(12)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(saved(tiny_hf_model("llama", num_hidden_layers=2), tmp_path_factory.mktemp("single")))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_hf_model("llama", num_hidden_layers=2)
    return Path(saved(model, tmp_path_factory.mktemp("sharded"), max_shard_size="40KB"))


@pytest.fixture
def folder(single: Path, tmp_path: Path) -> Path:
    """A copy of the single-file model that a test may break."""
    return Path(shutil.copytree(single, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors of the single file; dots in names are written as __."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_every_float_dtype_is_read_exactly(
    tmp_path: Path, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    values = {"a": torch.randn(7, 5).to(dtype), "b": torch.randn(3).to(dtype)}
    save_file(values, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.shapes == {"a": (7, 5), "b": (3,)}
    for name, value in values.items():
        out = torch.full(value.shape, torch.nan, dtype=out_dtype)
        checkpoint.read_into(name, out)
        assert torch.equal(out, value.to(out_dtype))
    checkpoint.close()


def test_same_values_are_the_same_bytes_in_the_same_format(tmp_path: Path) -> None:
    value = torch.randn(11, 13).to(torch.bfloat16)
    value[3, 4] = torch.nan
    zero = torch.zeros(2)
    tensors = {"a": value, "same": value.clone(), "other": value.clone(), "wide": value.float()}
    tensors |= {"flat": value.reshape(13, 11).clone(), "zero": zero, "minus": -zero}
    tensors["other"][10, 12] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.same_values("a", "same")
    assert not any(checkpoint.same_values("a", other) for other in ("other", "wide", "flat"))
    assert not checkpoint.same_values("zero", "minus")


def test_nothing_stays_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(700, 50), "b": torch.randn(700, 50)}, path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    checkpoint.read_into("a", torch.empty(700, 50, dtype=torch.float16))
    checkpoint.same_values("a", "b")
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path not in [file.resolve() for file in Path("/proc/self/fd").iterdir()]


# vllm#51665 and friends: what is in the file decides whether the head is tied.
@pytest.mark.parametrize("flag", [True, False, "absent"], ids=["flag-true", "flag-false", "flag-absent"])
@pytest.mark.parametrize("head", ["none", "equal", "different"])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings is false")
def test_the_head_in_the_file_decides_about_tying(folder: Path, flag: object, head: str) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(9))
    rewrite(folder, lm_head__weight={"none": None, "equal": embedding, "different": other}[head])
    set_config(folder, tie_word_embeddings=flag)
    loaded = load_model(str(folder))
    model = loaded.model
    assert (model.head.weight is model.embedding.weight) == (head != "different")
    expected = other if head == "different" else embedding
    assert torch.equal(model.head.weight.dense(), expected)
    hf = tiny_hf_model("llama", num_hidden_layers=2)
    hf.lm_head.weight = torch.nn.Parameter(expected)
    logits = PagedDriver(loaded).step({"a": IDS})["a"]
    torch.testing.assert_close(logits, hf_logits(hf, IDS), rtol=0, atol=1e-4)
    parts = [model.embedding.weight, *([model.head.weight] if head == "different" else [])]
    for layer in model.layers:
        parts += [linear.weight for linear in (layer.attention.qkv, layer.attention.output)]
        parts += [linear.weight for linear in (layer.mlp.gate_up, layer.mlp.down)]
    num_norms = 2 * len(model.layers) + 1
    assert loaded.weights_nbytes == sum(part.nbytes for part in parts) + num_norms * 48 * 4


@pytest.mark.parametrize("head", ["none", "equal", "different"])
def test_progress_ends_at_its_total(folder: Path, head: str) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        folder,
        lm_head__weight={"none": None, "equal": embedding, "different": embedding + 1}[head],
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    set_config(folder, tie_word_embeddings=True)
    seen: list[tuple[int, int]] = []
    load_model(str(folder), progress=lambda name, done, total: seen.append((done, total)))
    total = 1 + 2 * 9 + 1 + (head != "none")
    assert seen == [(i + 1, total) for i in range(total)]


def test_a_missing_head_that_the_config_denies_is_said_aloud(folder: Path) -> None:
    rewrite(folder, lm_head__weight=None)
    set_config(folder, tie_word_embeddings=False)
    with pytest.warns(UserWarning, match="tie_word_embeddings is false, but there is no lm_head.weight"):
        model = load_model(str(folder)).model
    assert isinstance(model, DecoderCausalLM)
    assert model.head.weight is model.embedding.weight


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=None, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(WeightsError, match=r"2 tensors are missing that the config asks for: "
                       r"model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"):  # fmt: skip
        load_model(str(folder))


def test_tensors_without_a_place_are_named(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(96))
    with pytest.raises(WeightsError, match=r"1 tensor is in the checkpoint that this model has no place for: "
                       r"model\.layers\.0\.self_attn\.q_proj\.bias"):  # fmt: skip
        load_model(str(folder))


def test_a_layer_too_many_is_no_silent_loss(folder: Path) -> None:
    set_config(folder, num_hidden_layers=1)
    with pytest.raises(WeightsError, match=r"9 tensors are in the checkpoint that .*, and 3 more"):
        load_model(str(folder))


def test_rotary_buffers_of_old_checkpoints_are_harmless(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_model(str(folder))


def test_wrong_shapes_are_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(47))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: expected \(48,\), got \(47,\)"):
        load_model(str(folder))
    set_config(folder, intermediate_size=81)
    with pytest.raises(
        WeightsError, match=r"7 tensors are of another shape than the config says: .*, and 1 more"
    ):
        load_model(str(folder))


def test_a_dtype_that_is_no_float(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(
        WeightsError, match=r"tensor model\.norm\.weight has dtype I8; known: F64, F32, F16, BF16"
    ):
        load_model(str(folder))


def test_a_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (len(whole) - 1, 100, 5, 0):
        path.write_bytes(whole[:length])
        message = rf"{path}: is no safetensors file, or a truncated or corrupt one of {length} bytes"
        with pytest.raises(WeightsError, match=rf"{message} \(.*\); download it again"):
            load_model(str(folder))


def test_a_pointer_that_a_clone_without_git_lfs_has(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(WeightsError, match=r"is a pointer of Git LFS .* `git lfs pull` fetches them"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b"\xff\xfe",
    ],
)
def test_a_corrupt_header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(WeightsError, match=r"or a truncated or corrupt one of .*deserializing header: "):
        load_model(str(folder))


def test_missing_shards_are_named(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    (shards / names[1]).unlink()
    with pytest.raises(WeightsError, match=f"1 of {len(names)} shards are missing: {names[1]}"):
        load_model(str(shards))


def test_a_tensor_in_two_shards(shards: Path) -> None:
    first, *_, last = sorted(shards.glob("*.safetensors"))
    (name, value), *_ = load_file(first).items()
    save_file({**load_file(last), name: value}, last)
    with pytest.raises(WeightsError, match=f"tensor {name} is in two shards, {first.name} and {last.name}; "):
        load_model(str(shards))


def test_an_index_that_points_to_the_wrong_shard(shards: Path) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, last = (sorted(set(index["weight_map"].values()))[i] for i in (0, -1))
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][name] = last
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=f"says that tensor {name} is in {last}, but it is not"):
        load_model(str(shards))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no index of shards"),
        ("{}", "is no index of shards"),
        ("[" * 100_000, "is no index of shards"),
        ('{"weight_map": {}}', "at least one tensor"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "is no file name of a shard"),
        ('{"weight_map": {"a": 3}}', "is no file name of a shard"),
    ],
)
def test_a_broken_index(shards: Path, content: str, message: str) -> None:
    (shards / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=message):
        load_model(str(shards))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"weights are pickled \(pytorch_model.bin\).*save_pretrained"),
        ("model.gguf", "there is no model.safetensors, but there is model.gguf; give the path of that file"),
        ("README.md", "there is neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_folder_without_safetensors(folder: Path, file: str, message: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=message):
        load_model(str(folder))
