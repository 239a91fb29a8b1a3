"""What is launched before the first request; what it compiles is looked at in tests/gpu."""

import pytest
import torch

from octavo.errors import KernelArgumentError
from octavo.kernels import warm_up
from octavo.kernels.gpu_checks import Sweep, model_shape
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


def test_sizes_lie_on_both_sides_of_every_power_of_two() -> None:
    assert module._around_powers(10) == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert module._around_powers(1) == [1]
    assert {255, 256, 257, 2048} <= set(model_shape(CPU).token_counts())


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
    for job in module._jobs(model_shape(CPU, **{**small, **shape})):
        job()


def test_decode_and_prefill_of_every_kind_of_batch(launches: dict) -> None:
    run()
    calls = launches["flash_attn_varlen_func"]
    seen = {
        (options["cu_seqlens_q"] if "cu_seqlens_q" in options else arguments[3]).numel() - 1: None
        for arguments, options in calls
    }
    assert set(seen) == {1, 2, 3, 4, 5}
    longest = {arguments[5] for arguments, _ in calls}
    assert {*range(1, 10), 16, 17, 40} <= longest
    bounds = {arguments[6] for arguments, _ in calls}
    assert {1, 2, 16, 63, 64} <= bounds
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
