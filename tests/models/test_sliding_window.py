"""A window stated in a config, on its whole way: to the kernel's call in each layer, and into the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model

import octavo.layers.attention
from octavo.models.registry import load_model

NUM_TOKENS = 13
SWITCH = {"use_sliding_window": True}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[int | None]]] = {
    # model type, what states the window, what takes it away, and the window of each layer
    "mistral": ("mistral", {"sliding_window": 3}, {"sliding_window": None}, [3, 3, 3]),
    "mistral, itself alone": ("mistral", {"sliding_window": 1}, {"sliding_window": None}, [1, 1, 1]),
    "mixtral": ("mixtral", {"sliding_window": 3}, {"sliding_window": None}, [3, 3, 3]),
    "qwen2": (
        "qwen2",
        {**SWITCH, "head_dim": 8, "sliding_window": 3, "max_window_layers": 1},
        {"use_sliding_window": False, "head_dim": 8},
        [None, 3, 3],
    ),
    "qwen2, last layer": (
        "qwen2",
        {**SWITCH, "head_dim": 8, "sliding_window": 2, "max_window_layers": 2},
        {"use_sliding_window": False, "head_dim": 8},
        [None, None, 2],
    ),
    "qwen2, layer_types": (
        "qwen2",
        {**SWITCH, "head_dim": 8, "sliding_window": 4, "layer_types": LAYERS},
        {"use_sliding_window": False, "head_dim": 8},
        [None, 4, None],
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**SWITCH, "sliding_window": 3, "max_window_layers": 3},  # there every second layer below has one
        {"use_sliding_window": False},
        [3, None, 3],
    ),
    "qwen3": (
        "qwen3",
        {**SWITCH, "sliding_window": 3, "max_window_layers": 2},
        {"use_sliding_window": False},
        [None, None, 3],
    ),
    "qwen3_moe": ("qwen3_moe", {**SWITCH, "sliding_window": 3}, {"use_sliding_window": False}, [3, 3, 3]),
}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The windows that the kernel is called with, in the order of the calls."""
    seen: list[tuple[int, int]] = []
    attend = octavo.layers.attention.flash_attn_varlen_func

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["window_size"])
        return attend(*arguments, **options)

    monkeypatch.setattr(octavo.layers.attention, "flash_attn_varlen_func", noted)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_reaches_the_kernel_in_its_layers_and_changes_the_logits(
    family: str, windows: list[tuple[int, int]], tmp_path: Path
) -> None:
    model_type, stated, without, expected = FAMILIES[family]
    hf = tiny_hf_model(model_type, **stated)
    folder = saved(hf, tmp_path / "with")
    if "max_window_layers" in stated and model_type != "qwen2_moe":
        # Transformers writes layer_types now; files from before have only the other key.
        config = json.loads((tmp_path / "with" / "config.json").read_text())
        del config["layer_types"]
        (tmp_path / "with" / "config.json").write_text(json.dumps(config))
    driver = PagedDriver(load_model(folder))
    ids = random_ids(NUM_TOKENS, seed=5)
    # A prompt, a chunk that looks back over its border, and single tokens.
    logits = torch.cat([driver.step({"a": part})["a"] for part in (ids[:6], ids[6:11], ids[11:12], ids[12:])])
    # A kernel's window counts the keys before the token; a config's counts the token, too.
    assert windows == [(-1, -1) if window is None else (window - 1, 0) for window in expected] * 4
    torch.testing.assert_close(logits, hf_logits(hf, ids), rtol=0, atol=1e-4)

    windows.clear()
    plain = tiny_hf_model(model_type, **without)
    plain.load_state_dict(hf.state_dict())
    full = PagedDriver(load_model(saved(plain, tmp_path / "without"))).step({"a": ids})["a"]
    assert windows == [(-1, -1)] * len(expected)
    torch.testing.assert_close(full, hf_logits(plain, ids), rtol=0, atol=1e-4)
    shortest = min(window for window in expected if window is not None)
    torch.testing.assert_close(logits[:shortest], full[:shortest], rtol=0, atol=1e-4)
    assert ((logits - full)[shortest:].abs().amax(1) > 0.1).all(), "what the window hides must matter"
