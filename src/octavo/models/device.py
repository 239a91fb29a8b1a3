"""Which device a model goes to."""

from __future__ import annotations

import contextlib
import logging
import threading

import torch

from octavo.config import DEVICES, check_choice
from octavo.errors import ConfigError
from octavo.kernels.triton import hashing_of_triton, unfit_reason

logger = logging.getLogger("octavo")


def resolve_device(name: str) -> torch.device:
    """The device that the option `device` means here; ``auto`` is the current GPU where there is one that
    the Triton kernels run on: plain torch on a GPU is slower than the compiled kernels of the CPU.

    Raises ConfigError for an unknown name, and for ``cuda`` where torch finds no GPU.
    """
    check_choice("device", name, DEVICES)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device='cuda' was asked for, and {_no_gpu()}, or pass device='cpu'")
    if name == "auto" and (reason := unfit_reason("cuda")) is not None:
        logger.warning("device='auto' takes the CPU: %s. device='cuda' takes the GPU in plain torch.", reason)
        return torch.device("cpu")
    hashing_of_triton()  # done by the time that the weights are there
    device = torch.device("cuda", torch.cuda.current_device())
    # Not a daemon: a process should not end in the midst of it.
    threading.Thread(target=_use, args=(device,), name="first use of the GPU").start()
    return device


def _use(device: torch.device) -> None:
    """Have the driver make its context there, a quarter of a second, while files are read."""
    with contextlib.suppress(Exception):  # whoever uses it next says what is wrong
        torch.zeros(1, device=device)


def _no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU alone; install a build for your GPU"
    return f"torch {torch.__version__} finds no GPU; check that the driver is there (nvidia-smi shows it)"
