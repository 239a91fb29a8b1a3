"""`octavo kv`: the figures, where a model may come from, and what is refused."""

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo import LLM
from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import KVCache
from octavo.cli.kv import estimate_model
from octavo.config import EngineConfig

KEYS = {
    "model", "source", "num_layers", "num_kv_heads", "head_dim", "value_head_dim", "windows", "kv_dtype",
    "kv_scales", "block_size", "bytes_per_token", "bytes_per_block", "context", "max_len",
    "blocks_per_request", "bytes_per_request", "waste_tokens", "waste_bytes", "windowed_bytes_per_request",
    "contiguous_bytes_per_request", "requests", "total_bytes", "contiguous_total_bytes", "memory_bytes",
    "num_blocks", "requests_fit", "windowed_requests_fit", "contiguous_requests_fit",
}  # fmt: skip


@pytest.fixture
def kv_json(octavo):
    def run(*arguments):
        status, out, err = octavo("kv", *arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def test_qwen3_06b_is_112_kib_a_token_and_4_375_gib_at_40960(kv_json):
    report = kv_json("Qwen/Qwen3-0.6B")
    assert set(report) == KEYS
    assert report["bytes_per_token"] == 112 * 1024
    assert (report["context"], report["max_len"]) == (40_960, 40_960)
    assert report["bytes_per_request"] == 4.375 * 2**30
    assert report["kv_dtype"] == "bfloat16"
    assert report["memory_bytes"] is report["requests_fit"] is report["num_blocks"] is None


def test_c57_a_thousand_tokens_of_qwen3_4b(kv_json):
    report = kv_json("qwen3-4b", "--context", 1_000, "--memory", "24GiB", "--requests", 8)
    assert report["bytes_per_token"] == 147_456
    assert report["bytes_per_request"] == 148_635_648
    assert (report["blocks_per_request"], report["waste_tokens"], report["waste_bytes"]) == (63, 8, 1_179_648)
    assert report["total_bytes"] == 8 * 148_635_648
    assert report["contiguous_bytes_per_request"] == 40_960 * 147_456
    assert (report["requests_fit"], report["contiguous_requests_fit"], report["num_blocks"]) == (
        173,
        4,
        10_922,
    )


@pytest.mark.parametrize(
    ("arguments", "bytes_per_token"),
    [
        (["--kv-dtype", "float32"], 224 * 1024),
        (["--kv-cache-dtype", "fp8"], 56 * 1024 + 28 * 8 * 2 * 4),
        (["--kv-cache-dtype", "fp8", "--kv-scales", "tensor"], 56 * 1024),
        (["--kv-dtype", "int8", "--kv-scales", "token_head"], 56 * 1024 + 28 * 8 * 2 * 4),
    ],
)
def test_dtypes_and_scales(kv_json, arguments, bytes_per_token):
    assert kv_json("qwen3-0.6b", *arguments)["bytes_per_token"] == bytes_per_token


def test_a_window_is_shown_beside_what_octavo_allocates(kv_json):
    report = kv_json("mistral-7b-v0.1", "--memory", "24GiB")
    assert report["windows"] == [4096] * 32
    assert report["bytes_per_request"] == 4 * 2**30
    assert report["windowed_bytes_per_request"] == 257 * 16 * 131_072
    assert (report["requests_fit"], report["windowed_requests_fit"]) == (6, 47)


def test_the_figures_are_what_the_storage_allocates():
    estimate = estimate_model("smollm2-135m", context=100, kv_dtype="float32")
    cache = KVCache(estimate.spec, estimate.sizing.num_blocks)
    assert cache.nbytes == estimate.sizing.request_bytes == 7 * 16 * 46_080
    assert estimate.spec == KVCacheSpec(30, 3, 64, "float32")


def test_the_figures_are_what_the_engine_allocates(kv_json, model_folder):
    report = kv_json(model_folder, "--memory", "1MiB")
    with LLM(model_folder, load_format="dummy", kv_cache_memory="1MiB") as llm:
        assert llm.engine.runner.kv_cache.nbytes == report["num_blocks"] * report["bytes_per_block"] == 2**20


@pytest.mark.parametrize("dtype", ["fp8", "int8", "float16"])
def test_a_cache_is_sized_as_the_engine_builds_it(kv_json, model_folder, monkeypatch, dtype):
    # A CPU refuses caches of one byte, so the engine is stopped where it would allocate one.
    class Stop(Exception):
        pass

    def allocate(spec, num_blocks, device):
        raise Stop(spec)

    monkeypatch.setattr("octavo.engine.build._allocate", allocate)
    monkeypatch.setattr(
        EngineConfig, "on_device", lambda self, device: self.replace(max_num_batched_tokens=64)
    )
    with pytest.raises(Stop) as stopped:
        LLM(model_folder, load_format="dummy", num_blocks=8, kv_cache_dtype=dtype)
    (spec,) = stopped.value.args
    report = kv_json(model_folder, "--kv-cache-dtype", dtype)
    assert (report["kv_dtype"], report["kv_scales"]) == (spec.dtype, spec.scales)
    assert report["bytes_per_block"] == spec.bytes_per_block == KVCache(spec, 1).nbytes


def test_what_scales_a_cache_of_one_byte_counts_is_said(octavo):
    _, out, _ = octavo("kv", "qwen3-0.6b", "--kv-cache-dtype", "fp8")
    assert "float8_e4m3, fp32 scales per token and head\n" in out
    assert "on a GPU it allocates this for --kv-cache-dtype fp8." in out
    _, out, _ = octavo("kv", "qwen3-0.6b", "--kv-cache-dtype", "int8", "--kv-scales", "tensor")
    assert "Scales are not counted; without --kv-scales these are the engine's figures" in out


def test_the_table_for_people(octavo):
    status, out, err = octavo("kv", "qwen3-4b", "--context", 1_000, "--memory", "24GiB", "--requests", 8)
    assert (status, err) == (0, "")
    for text in (
        "36 layers, 8 KV heads of 128, bfloat16",
        "144 KiB",
        "63 blocks, 0.8% wasted",
        "173",
        "10,922 blocks",
        "on a CPU the engine takes float32",
    ):
        assert text in out
    _, out, _ = octavo("kv", "gemma-3-1b", "--memory", "1GiB", "--kv-dtype", "fp16")
    assert "fit with windows applied" in out
    assert "the engine takes" not in out
    _, out, _ = octavo("kv", "deepseek-v3")
    assert "one latent of 576" in out


def test_the_list_of_known_shapes(octavo):
    status, out, _ = octavo("kv", "--list")
    assert status == 0
    assert "qwen3-0.6b              112 KiB a token in bfloat16\n" in out


# Where a model may come from


def test_a_folder_and_its_config_file(kv_json, model_folder):
    for path in (model_folder, model_folder / "config.json"):
        report = kv_json(path)
        assert report["bytes_per_token"] == 2 * 2 * (8 + 8) * 4
        assert (report["context"], report["source"]) == (256, str((model_folder / "config.json").resolve()))


def test_a_folder_wins_over_a_known_shape(kv_json, model_folder, tmp_path, monkeypatch):
    (tmp_path / "gpt2").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    assert kv_json("gpt2")["num_layers"] == 2


def write_gguf(path, arch, **metadata):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{arch}.{key.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA = {"block_count": 4, "embedding_length": 64, "context_length": 100, "attention__head_count": 8}


def test_c57_a_gguf_file_states_key_and_value_length(kv_json, tmp_path):
    path = write_gguf(
        tmp_path / "a.gguf", "llama", **LLAMA,
        attention__head_count_kv=2, attention__key_length=32, attention__value_length=16,
    )  # fmt: skip
    report = kv_json(path)
    assert (report["head_dim"], report["value_head_dim"], report["num_kv_heads"]) == (32, 16, 2)
    assert report["bytes_per_token"] == 4 * 2 * (32 + 16) * 2
    assert (report["context"], report["kv_dtype"]) == (100, "float16")


def test_a_gguf_file_without_lengths_or_kv_heads(kv_json, tmp_path):
    report = kv_json(write_gguf(tmp_path / "a.gguf", "llama", **LLAMA))
    assert (report["head_dim"], report["value_head_dim"], report["num_kv_heads"]) == (8, 8, 8)


def test_a_gguf_file_is_read_as_the_engine_reads_it(kv_json, tmp_path):
    # Qwen3's config.json would mean 128 where this file means 64 / 8; a llama with a window is a Mistral.
    assert kv_json(write_gguf(tmp_path / "a.gguf", "qwen3", **LLAMA))["head_dim"] == 8
    windowed = kv_json(write_gguf(tmp_path / "b.gguf", "llama", **LLAMA, attention__sliding_window=48))
    assert windowed["windows"] == [48] * 4


def test_gguf_layers_without_kv_do_not_count_and_unequal_ones_are_refused(kv_json, octavo, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", "llama", **LLAMA, attention__head_count_kv=[0, 2, 0, 2])
    assert (kv_json(path)["num_layers"], kv_json(path)["num_kv_heads"]) == (2, 2)
    path = write_gguf(tmp_path / "b.gguf", "llama", **LLAMA, attention__head_count_kv=[1, 2, 1, 2])
    status, _, err = octavo("kv", path)
    assert status == 1
    assert "layers with different numbers of KV heads [1, 2, 1, 2] cannot be sized" in err


# The plot


@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
@pytest.mark.parametrize("memory", [[], ["--memory", "24GiB"]], ids=["size", "size and count"])
def test_a_plot_is_written(octavo, tmp_path, name, magic, memory):
    status, out, err = octavo("kv", "gemma-3-1b", "--plot", tmp_path / name, *memory)
    assert (status, err) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert f"plot written to {tmp_path / name}" in out


def test_json_stays_json_with_a_plot(kv_json, tmp_path):
    assert kv_json("gpt2", "--plot", tmp_path / "a.svg")["bytes_per_token"] == 36_864


def test_a_missing_matplotlib_says_what_to_install(octavo, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = octavo("kv", "gpt2", "--plot", tmp_path / "a.png")
    assert (status, err) == (1, "octavo: error: --plot needs matplotlib: pip install matplotlib\n")


# What is refused, in one line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3-0.6"], "nothing is known under the name 'qwen3-0.6' (did you mean 'qwen3-0.6b'?)"),
        (["./nowhere"], "no file or folder at './nowhere'"),
        (["xyzzy"], "`octavo kv --list` shows the known shapes"),
        (["~nosuchuser/x"], "begins with no known home directory"),
        (["x" * 300], "`octavo kv --list` shows the known shapes"),
        (["gpt2", "--context", "0"], "--context must be between 1 and 1,099,511,627,776, got 0"),
        (["gpt2", "--context", "-3"], "--context must be between 1 and"),
        (["gpt2", "--context", str(10**30)], "--context must be between 1 and"),
        (["gpt2", "--context", "1025"], "--context 1,025 does not fit: the limit of gpt2 is 1,024 tokens"),
        (["gpt2", "--context", "9", "--max-len", "8"], "--context 9 does not fit: --max-len is 8 tokens"),
        (["gpt2", "--requests", "0"], "--requests must be between 1 and"),
        (["gpt2", "--kv-dtype", "fp9"], "unknown KV cache dtype 'fp9' (did you mean 'fp8'?)"),
        (["gpt2", "--kv-cache-dtype", ""], "unknown KV cache dtype ''; known are float32, float16"),
        (["gpt2", "--kv-scales", ""], "unknown scales ''"),
        (["gpt2", "--kv-scales", "row"], "unknown scales 'row'"),
        (["gpt2", "--kv-scales", "token_head"], "go with int8 and float8_e4m3, not with float16"),
        (["gpt2", "--block-size", "12"], "block_size must be a power of two"),
        (
            ["qwen3-0.6b", "--memory", "1B"],
            "--memory is 1 bytes, too small for one KV cache block: 16 tokens take 1,835,008 bytes, "
            "a request of 40,960 tokens 4,697,620,480 bytes",
        ),
        (["gpt2", "--memory", "24G"], "memory must be a positive size such as '24GiB'"),
        (["gpt2", "--plot", "a.txt"], "--plot must name a .png or .svg file, got 'a.txt'"),
        (["gpt2", "--plot", "nowhere/a.png"], "--plot: there is no folder 'nowhere'; make it first"),
    ],
)
def test_bad_input_is_one_clear_line(octavo, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = octavo("kv", *arguments)
    is_usage = any(words in message for words in ("must be between", "positive size", "--plot"))
    assert (status, out) == (2 if is_usage else 1, "")
    assert err.startswith("octavo: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_no_model_at_all(octavo):
    status, _, err = octavo("kv")
    assert status == 2
    assert "name a model, for example: octavo kv qwen3-0.6b" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "num_hidden_layers is missing"),
        ('{"n_layer": 2, "n_head": 2, "n_embd": 8}', "states no maximum length; give --context"),
    ],
)
def test_bad_config_files(octavo, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "config.json"):
        status, _, err = octavo("kv", path)
        assert status == 1
        assert message in err


def test_a_longer_context_is_sized_when_asked_for(kv_json):
    report = kv_json("gpt2", "--context", 1_025, "--max-len", 4_096)
    assert (report["blocks_per_request"], report["max_len"]) == (65, 4_096)


def test_the_documented_example_and_keys(octavo, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/kv_sizing.md").read_text(encoding="utf-8")
    example = page.split("```console\n$ octavo ")[1].split("```")[0]
    command, shown = example.split("\n", 1)
    monkeypatch.setenv("COLUMNS", "80")
    assert octavo(*command.split())[1] == shown
    table = page.split("## JSON")[1]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE)))) == KEYS
