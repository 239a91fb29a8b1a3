"""What is launched before the first request; what it compiles is looked at in tests/gpu, too."""

import inspect
import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.config import DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU
from octavo.errors import KernelArgumentError
from octavo.kernels import triton as triton_room
from octavo.kernels import warm_up
from octavo.kernels.gpu_checks import Sweep, model_shape
from octavo.kernels.triton import hashing_of_triton
from octavo.kernels.triton import warm_up as module

CPU = torch.device("cpu")


def test_the_cpu_needs_none() -> None:
    assert warm_up(4, 2, 64, torch.float32, torch.float32, 16, "cpu") == []


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "gpu", None])
def test_a_device_that_is_not_here_is_named(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    message = rf"^warm_up: device must be .*, got {device!r}\. Without a GPU .* pass 'cpu'"
    with pytest.raises(KernelArgumentError, match=message):
        warm_up(4, 2, 64, torch.float32, torch.float32, 16, device)  # type: ignore[arg-type]


def test_a_gpu_past_the_last_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        KernelArgumentError, match="one of the 2 cuda devices that torch finds here, got 'cuda:2'"
    ):
        warm_up(4, 2, 64, torch.float32, torch.float32, 16, "cuda:2")


def test_where_one_job_fails_those_that_have_not_begun_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    last: list[bool] = []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *arguments: bool, **options: bool) -> None:
            is_over.set()
            super().shutdown(*arguments, **options)

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(module, "_THREADS", 1)
    with pytest.raises(ZeroDivisionError):
        module._run_all([fail, is_over.wait, lambda: last.append(True)], CPU)
    assert last == []


def test_sizes_are_the_powers_of_two_and_the_largest() -> None:
    assert module.powers(10) == [1, 2, 4, 8, 10]
    assert module.powers(8) == [1, 2, 4, 8]
    assert module.powers(1) == [1]


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "expected"),
    [(1, 9, [1]), (2, 9, [1, 2]), (33, 99, [1, 2, 33]), (300, 2048, [1, 2, 33, 257]), (300, 40, [1, 2, 33])],
)
def test_batches_are_the_smallest_of_each_class(num_seqs: int, num_tokens: int, expected: list[int]) -> None:
    shape = model_shape(CPU, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    assert shape.batch_sizes() == expected
    large = model_shape(CPU, max_num_seqs=5000, max_num_batched_tokens=8192)
    assert large.batch_sizes() == [1, 2, 33, 257, 513, 1025]


@pytest.mark.parametrize(
    ("arch", "models"),
    [
        (
            90,
            [
                "Qwen3-0.6B",
                "Qwen3-8B",
                "SmolLM2",
                "biased",
                "large",
                "float16",
                "deep",
                "few sequences",
                "no groups",
                "windows",
                "invariant",
                "one sequence",
                "few tokens",
            ],
        ),
        (80, ["Qwen3-0.6B", "no groups", "scales", "float32"]),
        (90, ["bytes", "bytes of one scale", "shared bytes"]),
        (90, ["shared", "shared scales", "shared by few", "shared in few tokens", "shared by none"]),
    ],
)
def test_it_launches_every_variant_that_steps_need_and_no_other(arch: int, models: list[str]) -> None:
    """Against steps of all sizes, on a stand-in for a GPU that notes what would be compiled for each."""
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "helpers" / "warm_up_variants.py"
    done = subprocess.run(
        (sys.executable, script, str(arch), *models),
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(models)
    for model, counts in found.items():
        assert (counts["missed"], counts["needless"]) == ([], []), model
        assert counts["variants"] > 20, model
        # A start launches them all one by one, from Python.
        assert counts["launches"] < 8 * counts["variants"], model


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[object, ...]]]:
    """What the jobs call, kernel by kernel; nothing is computed."""
    found: dict[str, list[tuple[object, ...]]] = {}

    def spy(name: str) -> None:
        def called(*arguments: object, **options: object) -> object:
            found.setdefault(name, []).append((arguments, options))
            return (arguments[0], None) if "residual" in options else arguments[0] if arguments else None

        monkeypatch.setattr(f"octavo.kernels.{name}", called)

    for name in (
        "flash_attn_varlen_func",
        "write_kv_cache",
        "rotate_and_write_kv_cache",
        "rms_norm",
        "silu_and_mul",
        "sample",
    ):
        spy(name)
    return found


def run(**shape: object) -> None:
    small = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "max_model_len": 64, "vocab_size": 10}
    for jobs in module._rounds(model_shape(CPU, **{**small, **shape})):
        for job in jobs:
            job()


def test_decode_and_prefill_of_every_kind_of_batch(launches: dict) -> None:
    run()
    calls = launches["flash_attn_varlen_func"]
    seen = {
        (options["cu_seqlens_q"] if "cu_seqlens_q" in options else arguments[3]).numel() - 1: None
        for arguments, options in calls
    }
    assert set(seen) == {1, 2}
    longest = {arguments[5] for arguments, _ in calls}
    assert longest == {1, 2, 4, 8, 9, 16, 32, 39, 40}
    bounds = {arguments[6] for arguments, _ in calls}
    assert {9, 16, 40, 64} <= bounds
    for arguments, _ in calls:
        q, _, _, cu_q, _, max_q, max_k = arguments[:7]
        lens = cu_q.diff()
        assert int(lens.sum()) == len(q) <= 40
        assert int(lens.max()) == max_q <= max_k


@pytest.mark.parametrize("size", [1, 4, 8, 9])
def test_a_small_model_is_not_taken_past_its_bounds(launches: dict, size: int) -> None:
    run(max_num_batched_tokens=size, max_model_len=size)
    for arguments, _ in launches["flash_attn_varlen_func"]:
        assert len(arguments[0]) <= size
        assert int(arguments[3].diff().max()) <= arguments[5] <= arguments[6]


def test_options_of_the_model_reach_every_call(launches: dict) -> None:
    run(
        window_sizes=((-1, -1), (7, 0)),
        softcap=5.0,
        sinks=True,
        scales="token",
        qk_norm=True,
        interleaved=True,
    )
    options = [options for _, options in launches["flash_attn_varlen_func"]]
    assert {o["window_size"] for o in options} == {(-1, -1), (7, 0)}
    assert all(o["softcap"] == 5.0 and o["sinks"] is not None and o["k_scale"] is not None for o in options)
    fused = [options for _, options in launches["rotate_and_write_kv_cache"]]
    assert all(o["interleaved"] and o["q_weight"] is not None and o["v_scale"] is not None for o in fused)
    sampled = [options for _, options in launches["sample"]]
    assert {(o["top_k"] is None, o["top_p"] is None, o["min_p"] is None) for o in sampled} == {
        (True, True, True),
        (False, False, False),
    }


def test_what_a_model_has_not_is_left_out(launches: dict) -> None:
    run(hidden_size=None, intermediate_size=None, vocab_size=None, rotary_dim=0)
    assert set(launches) == {"flash_attn_varlen_func", "write_kv_cache"}


def test_the_sweep_that_follows_stays_inside_the_bounds() -> None:
    sweep = Sweep(model_shape(CPU))
    for lens_q, lens_k, bound_k, _ in sweep.batches(200):
        assert sum(lens_q) <= 2048
        assert len(lens_q) <= 257
        assert all(q <= k <= bound_k <= 40_000 for q, k in zip(lens_q, lens_k, strict=True))


def test_triton_hashes_itself_once_and_beside_what_else_is_done() -> None:
    """Half a gigabyte: each of twelve threads that compile would begin with that."""
    pytest.importorskip("triton")
    from triton.runtime.cache import triton_key

    thread = hashing_of_triton()
    assert hashing_of_triton() is thread
    thread.join()
    hashed = triton_key.cache_info().misses
    triton_key()
    assert triton_key.cache_info().misses == hashed >= 1


def test_a_triton_that_cannot_hash_itself_is_left_to_whoever_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")

    def broken() -> str:
        raise OSError("no such library")

    monkeypatch.setattr("triton.runtime.cache.triton_key", broken)
    with caplog.at_level(logging.DEBUG, logger="octavo"):
        thread = threading.Thread(target=triton_room._hash_triton)
        thread.start()  # what it raised would be a warning, and so an error
        thread.join()
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.DEBUG,
        "Triton is not hashed ahead: OSError: no such library",
    )


def test_steps_are_as_large_as_the_engine_s_where_nothing_is_said() -> None:
    default = inspect.signature(warm_up).parameters["max_num_batched_tokens"].default
    assert default == DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU
