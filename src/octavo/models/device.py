"""Which device a model goes to."""

from __future__ import annotations

import torch

from octavo.config import DEVICES, check_choice
from octavo.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device that the option `device` means here; ``auto`` is the current GPU where there is one.

    Raises ConfigError for an unknown name, and for ``cuda`` where torch finds no GPU.
    """
    check_choice("device", name, DEVICES)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device='cuda' was asked for, and {_no_gpu()}, or pass device='cpu'")
    return torch.device("cuda", torch.cuda.current_device())


def _no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU alone; install a build for your GPU"
    return f"torch {torch.__version__} finds no GPU; check that the driver is there (nvidia-smi shows it)"
