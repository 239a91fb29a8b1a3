"""torch's default device may be any: what runs on the CPU has its own memory there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.default_device import engine_results, kernel_results
from helpers.models import saved, tiny_hf_model
from helpers.text import letters_backend

# In a process of its own, as constants are made once, and as a wrong address ends it.
CODE = """
import sys
from pathlib import Path
import torch
torch.set_default_device("meta")
from helpers.default_device import engine_results, kernel_results
folder = Path(sys.argv[1])
torch.save((kernel_results(), [engine_results(folder / kind) for kind in sys.argv[2:]]), folder / "results")
"""
# Between them: rotary embedding of two kinds and none, both activations, experts.
MODELS = {
    "qwen3_moe": {},
    "gpt2": {},
    "llama": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    },
}


@pytest.mark.filterwarnings("ignore")  # of saving the models
def test_kernels_and_engine_do_not_ask_for_the_default_device(tmp_path: Path) -> None:
    for kind, more in MODELS.items():
        saved(tiny_hf_model(kind, **more), tmp_path / kind)
        letters_backend(52).save(str(tmp_path / kind / "tokenizer.json"))
    command = [sys.executable, "-c", CODE, str(tmp_path), *MODELS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    kernels, tokens = torch.load(tmp_path / "results")
    expected = kernel_results()
    assert list(kernels) == list(expected)
    for name, values in expected.items():
        assert torch.equal(kernels[name], values), name
    assert tokens == [engine_results(tmp_path / kind) for kind in MODELS]
