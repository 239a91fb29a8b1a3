from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from helpers.gguf_files import write_gguf
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model

from octavo.errors import CapacityError, ConfigError, ModelError, WeightsError
from octavo.models.registry import load_model

IDS = random_ids(15)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
}


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A folder with nothing but a config."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_hf_model("llama"), tmp_path_factory.mktemp("tiny"))


def test_dummy_weights_need_a_config_only(bare: str) -> None:
    loaded = load_model(bare, load_format="dummy", seed=3)
    logits = PagedDriver(loaded).step({"a": IDS})["a"]
    assert logits.shape == (15, 101)
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
    assert len(set(logits.argmax(1).tolist())) > 5
    assert loaded.generation_config == {"eos_token_id": 7}
    with pytest.raises(WeightsError, match="for random weights use load_format='dummy'"):
        load_model(bare)


def test_dummy_weights_follow_the_seed(bare: str) -> None:
    first, again, other = (load_model(bare, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    logits = [PagedDriver(loaded).step({"a": IDS})["a"] for loaded in (first, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert first.model_id == again.model_id != other.model_id


@pytest.mark.parametrize("tied", [True, False])
def test_dummy_weights_are_tied_as_the_config_says(bare: str, tied: bool) -> None:
    (Path(bare) / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    model = load_model(bare, load_format="dummy").model
    assert (model.head.weight is model.embedding.weight) == tied


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"load_format": "safetensor"},
            r"load_format must be one of 'auto', .*; got 'safetensor' \(did you mean 'safetensors'\?\)",
        ),
        ({"dtype": "fp32"}, "dtype must be one of 'auto', 'float32', 'bfloat16', 'float16'; got 'fp32'"),
        (
            {"quantization": "int4"},
            r"quantization must be one of None, 'float16', 'int8'; got 'int4' \(did you mean 'int8'\?\)",
        ),
        (
            {"quantization": "int8", "dtype": "bfloat16"},
            "quantization: 'int8' works with float32 activations",
        ),
        (
            {"quantization": "int8", "device": "meta"},
            "quantization: 'int8' is a CPU form of weights; the device is meta",
        ),
    ],
)
def test_options_that_are_wrong(tiny: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(tiny, **options)


def test_a_load_format_that_is_not_there(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'gguf' was asked for, but .* is a folder with config.json"):
        load_model(tiny, load_format="gguf")
    path = write_gguf(tmp_path / "model.gguf", tiny_hf_model("llama"))
    with pytest.raises(ModelError, match=r"'safetensors' was asked for, but .* is a GGUF file"):
        load_model(path, load_format="safetensors")
    assert load_model(path, load_format="gguf").source.kind == "gguf"
    assert load_model(tiny, load_format="safetensors").source.kind == "folder"


@pytest.mark.parametrize(
    ("quantization", "bytes_per_weight", "error"), [("float16", 2, 0.02), ("int8", 1.1, 0.3)]
)
def test_quantised_forms(tiny: str, quantization: str, bytes_per_weight: float, error: float) -> None:
    exact, loaded = load_model(tiny), load_model(tiny, quantization=quantization)
    assert loaded.dtype == torch.float32
    assert loaded.model.layers[0].mlp.down.weight.form == quantization
    assert loaded.weights_nbytes < exact.weights_nbytes * bytes_per_weight / 4 * 1.1
    expected = hf_logits(tiny_hf_model("llama"), IDS)
    difference = (PagedDriver(loaded).step({"a": IDS})["a"] - expected).square().mean().sqrt()
    assert 0 < difference < error * expected.std()


@pytest.mark.parametrize("quantization", ["float16", "int8"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_where_a_token_goes_is_not_quantised(model_type: str, quantization: str, tmp_path: Path) -> None:
    """Rounding a router sends tokens to other experts, and saves next to nothing."""
    hf = tiny_hf_model(model_type)
    mlp = load_model(saved(hf, tmp_path), quantization=quantization).model.layers[1].mlp
    assert {mlp.gate_up.form, mlp.down.form} == {quantization}
    expected = {
        name: weight for name, weight in hf.state_dict().items() if name.startswith("model.layers.1.mlp.")
    }
    (router,) = (weight for name, weight in expected.items() if name.endswith("mlp.gate.weight"))
    assert mlp.router.weight.form == "float32"
    assert torch.equal(mlp.router.weight.dense(), router)
    if model_type == "qwen2_moe":
        assert mlp.shared.down.weight.form == quantization
        assert mlp.shared_gate.weight.form == "float32"
        gate = expected["model.layers.1.mlp.shared_expert_gate.weight"]
        assert torch.equal(mlp.shared_gate.weight.dense(), gate)


@pytest.mark.parametrize("quantization", ["float16", "int8"])
def test_learned_positions_are_not_quantised(quantization: str, tmp_path: Path) -> None:
    hf = tiny_hf_model("gpt2")
    folder = saved(hf, tmp_path)
    exact, loaded = load_model(folder), load_model(folder, quantization=quantization)
    positions = loaded.model.positions.weight
    assert torch.equal(positions.dense(), hf.transformer.wpe.weight)
    assert loaded.model.embedding.weight.form == quantization
    assert positions.nbytes == exact.model.positions.weight.nbytes
    assert loaded.weights_nbytes == sum(held.nbytes for held in held_by(loaded.model))


def held_by(model: Any) -> list[Any]:
    """The packed weights and vectors of a GPT-2."""
    linears = [
        linear
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)
    ]
    norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)] + [model.norm]
    return [
        model.embedding.weight, model.positions.weight,
        *(part for linear in linears for part in (linear.weight, linear.bias)),
        *(part for norm in norms for part in (norm.weight, norm.bias)),
    ]  # fmt: skip


# The kernels then keep the very tensor they are given, which must not be loading's scratch memory.
def test_a_machine_that_cannot_pack(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.cpu.host.unfit_reason", lambda: "this test says so")
    loaded = load_model(tiny)
    assert loaded.model.layers[0].mlp.down.weight.form == "dense"
    assert "this test says so" in loaded.model.layers[0].mlp.down.weight.note
    expected = hf_logits(tiny_hf_model("llama"), IDS)
    torch.testing.assert_close(PagedDriver(loaded).step({"a": IDS})["a"], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(None, "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
def test_elsewhere_than_on_the_cpu_the_dtype_is_that_of_the_checkpoint(
    bare: str, stored: str | None, expected: str
) -> None:
    (Path(bare) / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": stored}))
    assert load_model(bare, load_format="dummy").dtype == torch.float32
    loaded = load_model(bare, load_format="dummy", device="meta")
    assert (loaded.dtype, loaded.device) == (getattr(torch, expected), torch.device("meta"))
    assert loaded.model.weights_form == "dense"
    weight = loaded.model.layers[0].mlp.down.weight.data
    assert (weight.dtype, weight.device) == (loaded.dtype, loaded.device)
    assert load_model(bare, load_format="dummy", device="meta", dtype="float32").dtype == torch.float32


def test_a_quantised_gguf_file_has_no_dtype_of_its_own(tmp_path: Path) -> None:
    model = tiny_hf_model("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    path = write_gguf(tmp_path / "q8.gguf", model, kind=GGMLQuantizationType.Q8_0)
    assert load_model(path, device="meta").dtype == torch.bfloat16
    path = write_gguf(tmp_path / "f32.gguf", tiny_hf_model("llama"))
    assert load_model(path, device="meta").dtype == torch.float32


def test_weights_that_a_device_has_no_room_for(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("octavo.models.decoder.DecoderCausalLM", run_out)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**30))
    expected = (
        r"the weights of .*bare' take [\d.]+ KiB in bfloat16, and meta has 1 GiB, of which 1 MiB were left "
        "when it ran out; .* take a smaller model"
    )
    with pytest.raises(CapacityError, match=expected):
        load_model(bare, load_format="dummy", device="meta")


def test_weights_that_memory_has_no_room_for(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(message: str) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr("octavo.models.decoder.DecoderCausalLM", fail)

    failing("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128 bytes.")
    with pytest.raises(CapacityError, match=r"take [\d.]+ KiB in float32, and [\d.]+ GiB are left; end what"):
        load_model(bare, load_format="dummy", device="cpu")
    failing("something else")
    with pytest.raises(RuntimeError, match="something else"):
        load_model(bare, load_format="dummy", device="cpu")


def test_model_id_tells_apart_what_must_not_share_a_cache(tiny: str, tmp_path: Path) -> None:
    base = load_model(tiny).model_id
    assert load_model(tiny).model_id == base
    ids = {base, load_model(tiny, dtype="bfloat16").model_id, load_model(tiny, quantization="int8").model_id}
    other = saved(tiny_hf_model("llama", seed=1), tmp_path)
    ids.add(load_model(other).model_id)
    os.utime(Path(other) / "model.safetensors", ns=(1, 1))
    ids.add(load_model(other).model_id)
    assert len(ids) == 5


def test_generation_config(tmp_path: Path) -> None:
    folder = saved(tiny_hf_model("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert load_model(folder).generation_config == {"temperature": 0.6, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").unlink()
    assert load_model(folder).generation_config == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", ["x", [1, "x"], -1, True, {}])
def test_end_of_sequence_ids_are_checked_with_their_file(bare: str, file: str, eos: Any) -> None:
    values = CONFIG if file == "config.json" else {}
    (Path(bare) / file).write_text(json.dumps({**values, "eos_token_id": eos}))
    with pytest.raises(ModelError, match=rf"{Path(bare).name}/{file}: each id in eos_token_id must be"):
        load_model(bare, load_format="dummy")


def test_the_logits_of_some_rows_are_those_rows(tiny: str) -> None:
    model = load_model(tiny).model
    hidden = torch.randn(5, 48)
    all_rows = model.compute_logits(hidden)
    assert torch.equal(model.compute_logits(hidden[[4, 1]]), all_rows[[4, 1]])
    assert model.compute_logits(hidden[:0]).shape == (0, 101)


def test_max_model_len_bounds_the_rope_table(tiny: str) -> None:
    attention = load_model(tiny, max_model_len=15).model.layers[0].attention
    assert attention.rope_table.shape == (15, 16)
    logits = PagedDriver(load_model(tiny, max_model_len=15)).step({"a": IDS})["a"]
    assert torch.equal(logits, PagedDriver(load_model(tiny)).step({"a": IDS})["a"])
    for wrong in (0, 65):
        with pytest.raises(ConfigError, match=rf"max_model_len: expected 1 to 64, .*, got {wrong}"):
            load_model(tiny, max_model_len=wrong)


def test_loading_holds_the_weights_once(tmp_path: Path) -> None:
    """Peak memory: the packed weights, one matrix more, and what the libraries themselves take."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "vocab_size": 4096}
    code = f"""
import json, resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from octavo.models import decoder
from octavo.models.config import ModelConfig
folder = Path(sys.argv[1])
hf = {{**{CONFIG!r}, **{shape!r}}}
if sys.argv[2] == "write":
    (folder / "config.json").write_text(json.dumps(hf))
    shapes = dict(decoder.tensor_shapes(ModelConfig.from_hf(hf)))
    save_file({{name: torch.zeros(shape) for name, shape in shapes.items()}}, folder / "model.safetensors")
else:
    from octavo.models.registry import load_model
    import octavo.models.weights.safetensors
    from octavo.kernels import pack_weight
    pack_weight(torch.zeros(64, 64), "float32")  # brings in the compiler
    def status(key):
        line = next(line for line in open("/proc/self/status") if line.startswith(key))
        return int(line.split()[1]) * 1024
    before = status("VmRSS")
    loaded = load_model(str(folder), quantization=sys.argv[2] if sys.argv[2] != "None" else None)
    print(loaded.weights_nbytes, status("VmHWM") - before, status("VmRSS") - before)
"""
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}

    def run(what: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), what]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    run("write")
    largest = 2 * 2048 * 512 * 4
    weights_nbytes, peak, _ = map(int, run("None").split())
    assert weights_nbytes > 150e6
    assert peak < weights_nbytes + largest + 16e6
    weights_nbytes, _, stays = map(int, run("int8").split())
    assert 40e6 < weights_nbytes < 60e6
    assert stays < weights_nbytes + largest + 16e6
