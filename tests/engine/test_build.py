"""Steps that are too large for the memory, where nobody said how large they shall be; what the log says."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import saved, tiny_hf_model

from octavo.cache.spec import KVCacheSpec
from octavo.config import EngineConfig
from octavo.engine import build
from octavo.engine.shared_prefixes import Sharing, sharing_for
from octavo.errors import CapacityError
from octavo.models.registry import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(saved(tiny_hf_model("llama"), tmp_path_factory.mktemp("model")), dtype="float32")


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than 1,000 tokens do not fit; as on a GPU, where nothing was said they start larger."""

    def num_blocks(config: EngineConfig, *arguments: object) -> int:
        assert config.max_num_batched_tokens is not None
        if config.max_num_batched_tokens > 1000:
            raise CapacityError("too little memory left for a step")
        return 12

    monkeypatch.setattr(build, "_num_blocks", num_blocks)
    monkeypatch.setattr(
        EngineConfig, "on_device", lambda self, device: self.replace(
            device=device, max_num_batched_tokens=self.max_num_batched_tokens or 8192
        )
    )  # fmt: skip


@pytest.mark.usefixtures("small_memory")
def test_steps_shrink_until_they_fit(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    engine = build.build_engine(EngineConfig(model="m"), loaded, None)
    assert engine.config.max_num_batched_tokens == engine.scheduler.max_num_batched_tokens == 512
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:4] == [
        f"steps of {size} tokens do not fit (too little memory left for a step); trying {size // 2}"
        for size in (8192, 4096, 2048, 1024)
    ]
    assert re.fullmatch(
        r"KV cache in \d+\.\d s: 12 blocks in 144 KiB; 192 tokens: requests of up to 64 tokens, "
        r"3 of these at once; 512 tokens a step",
        messages[4],
    )
    assert re.fullmatch(r"first steps in \d+\.\d s", messages[5])
    assert len(messages) == 6


@pytest.mark.usefixtures("small_memory")
def test_a_size_that_was_said_is_kept_or_refused(loaded: LoadedModel) -> None:
    with pytest.raises(CapacityError, match="too little memory left for a step"):
        build.build_engine(EngineConfig(model="m", max_num_batched_tokens=2048), loaded, None)
    engine = build.build_engine(EngineConfig(model="m", max_num_batched_tokens=700), loaded, None)
    assert engine.config.max_num_batched_tokens == 700


def test_kernels_are_compiled_for_what_the_sampler_asks_and_counted(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    asked: dict[str, Any] = {}

    def warm_up(*_: Any, **options: Any) -> list[Any]:
        asked.update(options)
        return [SimpleNamespace(from_disk=from_disk) for from_disk in (True, False, True)]

    monkeypatch.setattr(build, "warm_up", warm_up)
    config = EngineConfig(model="m", max_model_len=64, max_num_batched_tokens=512)
    build._compile_kernels(config, loaded, KVCacheSpec(2, 2, 8))
    (record,) = caplog.records
    assert re.fullmatch(r"3 kernels ready, 1 compiled, in \d+\.\d s", record.getMessage())
    # The engine's log probabilities come from torch: nobody would launch those kernels.
    assert asked["logprobs"] is False
    assert asked["logits_dtype"] == loaded.dtype
    # Kernels that add in one order are others than those of an engine that need not.
    assert asked["batch_invariant"] is False
    build._compile_kernels(config.replace(deterministic=True), loaded, KVCacheSpec(2, 2, 8))
    assert asked["batch_invariant"] is True


def test_kernels_are_compiled_for_the_padding_of_steps_from_graphs(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def warm_up(*_: Any, **options: Any) -> list[Any]:
        asked.append(options["max_num_seqs"])
        return []

    monkeypatch.setattr(build, "warm_up", warm_up)
    monkeypatch.setattr(build, "_is_compiled", lambda *_: True)
    config = EngineConfig(model="m", max_model_len=64, max_num_batched_tokens=512, max_num_seqs=32)
    for options in ({}, {"enforce_eager": True}, {"deterministic": True}):
        settled = config.replace(**options).on_device("cuda")
        build._compile_kernels(settled, loaded, KVCacheSpec(2, 2, 8))
    assert asked == [33, 32, 32]


def test_memory_is_kept_free_for_all_that_steps_under_way_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVCacheSpec(2, 2, 8)
    monkeypatch.setattr(build, "_largest_step_bytes", lambda *_: 0)
    monkeypatch.setattr(build, "_free_bytes", lambda _: 2**24)
    monkeypatch.setattr(build, "_is_compiled", lambda *_: True)
    loaded: Any = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(vocab_size=1000))

    def num_blocks(**options: Any) -> int:
        config = EngineConfig(model="m", max_num_seqs=64, max_model_len=10**6, **options)
        return build._num_blocks(config, loaded, spec)

    alone = num_blocks(overlap=False)
    # Each holds the model's logits and, where options change some, a changed copy of all: 4 bytes an entry.
    held = 3 * 64 * 1000 * (4 + 4)
    expected = (2**24 - held) / 2**24
    assert num_blocks(overlap=True, run_ahead=3) / alone == pytest.approx(expected, rel=1e-3)


def test_memory_is_kept_free_for_graphs_only_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVCacheSpec(2, 2, 8)
    monkeypatch.setattr(build, "_largest_step_bytes", lambda *_: 2**22)
    monkeypatch.setattr(build, "_free_bytes", lambda _: 2**24)
    loaded: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16,
        config=SimpleNamespace(vocab_size=1000, hidden_size=64),
    )  # fmt: skip

    def num_blocks(*, is_compiled: bool, **options: Any) -> int:
        monkeypatch.setattr(build, "_is_compiled", lambda *_: is_compiled)
        options = {"max_model_len": 10**5, "max_num_seqs": 8, "max_num_batched_tokens": 128} | options
        config = EngineConfig(model="m", device="cuda", overlap=False, cascade_attention=False, **options)
        return build._num_blocks(config, loaded, spec)

    without = num_blocks(is_compiled=True, enforce_eager=True)
    assert num_blocks(is_compiled=True, deterministic=True) / without == pytest.approx(2 / 3, rel=1e-3)
    # Graphs of 16, 64 and 128 tokens each keep their hidden states; block tables, of 16 tokens a block.
    kept = (16 + 64 + 128) * 64 * 2 + 2 * (8 + 1) * 6250 * 4
    expected = (2**24 - 2**23 - kept) / (2**24 - 2**22)
    assert num_blocks(is_compiled=True) / without == pytest.approx(expected, rel=1e-3)
    # Attention in plain torch is in no graph.
    assert num_blocks(is_compiled=False) == without


def test_memory_is_kept_free_for_steps_that_share_only_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = KVCacheSpec(2, 2, 8)
    monkeypatch.setattr(build, "_largest_step_bytes", lambda *_: 2**20)
    monkeypatch.setattr(build, "_free_bytes", lambda _: 2**24)
    monkeypatch.setattr(build, "_is_compiled", lambda *_: True)
    monkeypatch.setattr(build, "kept_bytes", lambda *_: 0)
    sizes = SimpleNamespace(vocab_size=1000, num_heads=4, hidden_size=32)
    loaded: Any = SimpleNamespace(
        device=torch.device("cuda"), config=sizes, dtype=torch.bfloat16,
        model=SimpleNamespace(weights_form="dense"),
    )  # fmt: skip

    def num_blocks(asked: bool | None, **options: Any) -> int:
        options = {"max_model_len": 10**6, "overlap": False, "cascade_attention": asked} | options
        config = EngineConfig(model="m", **options)
        return build._num_blocks(config.on_device("cuda"), loaded, spec)

    alone = num_blocks(False)
    # Of 256 rows with 4 heads two results of 8 floats, and their LSEs.
    held = 2 * 256 * 4 * (8 + 1) * 4
    expected = (2**24 - 2**21 - held) / (2**24 - 2**21)
    for asked in (None, True):
        assert num_blocks(asked) / alone == pytest.approx(expected, rel=1e-3)
    # Too few for an octet, and too short for it to be worth anything.
    assert num_blocks(None, max_num_seqs=7) == num_blocks(False, max_num_seqs=7)
    assert num_blocks(None, max_model_len=256) == num_blocks(False, max_model_len=256)


EIGHT = "keys are read once for 8 sequences, and no more than {} run at once"


@pytest.mark.parametrize(
    ("options", "change", "why_not"),
    [
        ({}, "nothing", None),
        ({"max_num_seqs": 7}, "nothing", EIGHT.format(7)),
        ({"max_num_batched_tokens": 6}, "nothing", EIGHT.format(6)),
        (
            {},
            "a small model",
            "16 sequences of 64 tokens have too few keys for it to be worth its launches",
        ),
        (
            {"num_blocks": 4, "max_model_len": 32},
            "a small model",
            "16 sequences of 16 tokens have too few keys for it to be worth its launches",
        ),
        (
            {},
            "plain torch",
            "decode steps come from no CUDA graphs, as this model's kernels are not compiled",
        ),
        ({}, "windows", "every layer of the model attends to a window"),
    ],
)
@pytest.mark.parametrize("asked", [True, None, False])
def test_who_asks_for_common_keys_in_vain_is_told_why(
    options: dict[str, Any],
    change: str,
    why_not: str | None,
    asked: bool | None,
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A CPU in the place of a GPU, for which it is worth a byte less from two blocks on; whoever left it open
    hears nothing."""
    made: list[Any] = []

    def warm_up(*_: Any, **options: Any) -> list[Any]:
        made.append(options["shared_prefixes"])
        return []

    def use_graphs(runner: Any, max_model_len: int, capture: Any, sharing: Any, *, must_share: bool) -> None:
        assert must_share is (asked is True)
        made.append(sharing is not None)

    def sharing_soon(*arguments: Any) -> Any:
        sharing = sharing_for(*arguments)
        return sharing and Sharing(1, 4, 8, 1)

    monkeypatch.setattr(build, "warm_up", warm_up)
    monkeypatch.setattr(build, "CudaCapture", lambda device: None)
    monkeypatch.setattr(build.ModelRunner, "use_graphs", use_graphs)
    monkeypatch.setattr(build.ModelRunner, "use_mixed_graphs", lambda *_: None)
    monkeypatch.setattr(build, "_is_compiled", lambda *_: change != "plain torch")
    play_a_gpu(monkeypatch)
    if change != "a small model":
        monkeypatch.setattr(build, "sharing_for", sharing_soon)
    if change == "windows":
        loaded = load_model(saved(tiny_hf_model("mistral", sliding_window=8), tmp_path), dtype="float32")
    sizes = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    config = EngineConfig(model="m", **(sizes | {"cascade_attention": asked, "overlap": False} | options))
    build.build_engine(config, loaded, None)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ([f"cascade_attention has no effect: {why_not}"] if asked and why_not else [])
    shares = asked is not False and why_not is None
    assert made == ([] if change == "plain torch" else [shares, shares])


@pytest.mark.parametrize("option", ["enforce_eager", "deterministic"])
def test_what_excludes_it_leaves_no_trace_of_it(
    option: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[Any] = []

    def warm_up(*_: Any, **options: Any) -> list[Any]:
        given.append(options["shared_prefixes"])
        return []

    def use_graphs(runner: Any, max_model_len: int, capture: Any, sharing: Any, *, must_share: bool) -> None:
        given.append((sharing, must_share))

    monkeypatch.setattr(build, "warm_up", warm_up)
    monkeypatch.setattr(build, "CudaCapture", lambda device: None)
    monkeypatch.setattr(build.ModelRunner, "use_graphs", use_graphs)
    monkeypatch.setattr(build.ModelRunner, "use_mixed_graphs", lambda *_: None)
    monkeypatch.setattr(build, "_is_compiled", lambda *_: True)
    monkeypatch.setattr(build, "sharing_for", lambda *_: Sharing(1, 4, 8, 1))
    play_a_gpu(monkeypatch)
    sizes = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    engine = build.build_engine(EngineConfig(model="m", **(sizes | {option: True})), loaded, None)
    assert engine.config.cascade_attention is None
    assert given == ([False] if option == "enforce_eager" else [False, (None, False)])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("options", "is_compiled", "expected"),
    [
        ({}, True, ["decode", ("other", 64, 32, "capture")]),
        ({"enforce_eager": True}, True, []),
        ({"deterministic": True}, True, ["decode"]),
        ({}, False, []),
    ],
    ids=str,
)
def test_which_graphs_an_engine_has(
    options: dict[str, Any],
    is_compiled: bool,
    expected: list[Any],
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(build, "warm_up", lambda *_, **options: [])
    monkeypatch.setattr(build, "CudaCapture", lambda device: "capture")
    monkeypatch.setattr(build.ModelRunner, "use_graphs", lambda *_, **options: made.append("decode"))
    monkeypatch.setattr(
        build.ModelRunner, "use_mixed_graphs", lambda _, *sizes: made.append(("other", *sizes))
    )
    monkeypatch.setattr(build, "_is_compiled", lambda *_: is_compiled)
    play_a_gpu(monkeypatch)
    sizes = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    build.build_engine(EngineConfig(model="m", **(sizes | options)), loaded, None)
    assert made == expected


def play_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are settled as on a GPU, whatever the model lies on."""
    on_device = EngineConfig.on_device
    monkeypatch.setattr(EngineConfig, "on_device", lambda self, device: on_device(self, "cuda"))
