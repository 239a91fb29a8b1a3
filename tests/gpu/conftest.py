"""What needs an NVIDIA GPU: `scripts/test tests/gpu`, or `python -m pytest tests/gpu` with src on the path."""

from pathlib import Path

import torch


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if torch.cuda.is_available() else True
