"""A stand-in for a GPU: public calls compile what they would launch there, and launch nothing.

For a process of its own, in which Triton does not interpret: `with NoGpu(90) as gpu: call(...); gpu.take()`
gives what the call launched. One architecture per process, as Triton remembers the first. Inside the block
every tensor says that it is on the GPU; what the calls return is whatever was in memory.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.knobs import nvidia
from triton.runtime import driver

from octavo.kernels import backend

# arch -> (name, multiprocessors, shared memory that one program may have, in bytes)
GPUS = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 163 * 1024),
    86: ("NVIDIA GeForce RTX 3090", 82, 99 * 1024),
    89: ("NVIDIA GeForce RTX 4090", 128, 99 * 1024),
    90: ("NVIDIA H200", 132, 227 * 1024),
}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_BYTES = 16  # of an instruction


@dataclass(frozen=True)
class Kernel:
    """One specialisation as the hardware gets it.

    Attributes:
        instructions: how often each opcode occurs, modifiers included.
        spills: registers stored to memory or loaded from it, in the text.
        spills_in_loops: those in the innermost loops around matrix instructions, or in any loop without one.
    """

    name: str
    num_warps: int
    shared: int
    registers: int
    instructions: Counter[str]
    spills: int
    spills_in_loops: int

    def count(self, pattern: str) -> int:
        """Instructions whose opcode, with its modifiers, matches the pattern from its start."""
        return sum(n for opcode, n in self.instructions.items() if re.match(pattern, opcode))


class _Driver(DriverBase):
    def __init__(self, gpu: NoGpu) -> None:
        self._target = GPUTarget("cuda", gpu.arch, 32)
        self.launcher_cls = gpu._launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: vars(gpu.properties),
            load_binary=lambda *_: (object(), 0, 0, 0, 1024),
            unload_module=lambda _: None,
        )

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError  # only launchers ask, and ours do not

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing can be timed without a GPU")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0


class _EverythingIsOnTheGpu(TorchFunctionMode):
    """Tensors are on the CPU and say that they are not; new ones, asked for on the GPU, are there, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DEVICE_QUESTIONS:
            return _DEVICE_QUESTIONS[func]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        args = ["cpu" if isinstance(x, torch.device) and func is torch.Tensor.to else x for x in args]
        return func(*args, **kwargs)


_DEVICE_QUESTIONS: dict[Any, object] = {
    torch.Tensor.device.__get__: torch.device("cuda", 0),
    torch.Tensor.is_cpu.__get__: False,
    torch.Tensor.is_cuda.__get__: True,
}


class NoGpu:
    def __init__(self, arch: int) -> None:
        name, multiprocessors, shared = GPUS[arch]
        self.arch = arch
        self._compiled: dict[str, CompiledKernel] = {}  # by the hash of all that went into it
        self._launched: dict[str, None] = {}  # in order, each once
        self.properties = SimpleNamespace(
            name=name,
            major=arch // 10,
            minor=arch % 10,
            multi_processor_count=multiprocessors,
            multiprocessor_count=multiprocessors,  # in Triton's spelling
            max_shared_mem=shared,
            shared_memory_per_block_optin=shared,
            warp_size=32,
            warpSize=32,
            L2_cache_size=50 * 2**20,
            total_memory=80 * 2**30,
        )

    def _launcher(self, src: Any, metadata: Any) -> Any:
        return lambda *_args, **_options: self._launched.setdefault(metadata.hash)

    def __enter__(self) -> Self:
        self._undo = ExitStack()
        before = driver._active
        self._undo.callback(driver.set_active, before)
        driver.set_active(_Driver(self))
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: -1,  # the number that a CPU tensor gives for its device
            "get_device_properties": lambda *_: self.properties,
            "get_device_capability": lambda *_: (self.arch // 10, self.arch % 10),
            "get_device_name": lambda *_: self.properties.name,
            "is_current_stream_capturing": lambda: False,
        }
        for function, answer in answers.items():
            self._undo.enter_context(mock.patch.object(torch.cuda, function, answer))
        init = CompiledKernel.__init__

        def remember(kernel: CompiledKernel, src: Any, metadata_group: Any, hash: str) -> None:
            init(kernel, src, metadata_group, hash)
            self._compiled[kernel.metadata.hash] = kernel

        self._undo.enter_context(mock.patch.object(CompiledKernel, "__init__", remember))
        self._undo.enter_context(backend.use("triton"))
        self._undo.enter_context(_EverythingIsOnTheGpu())
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def launched(self) -> list[str]:
        """The hashes of what was launched since the last time, for `read`."""
        hashes = list(self._launched)
        self._launched.clear()
        return hashes

    def take(self) -> list[Kernel]:
        """What was launched since the last time."""
        hashes = self.launched()
        read = self.read(hashes)
        return [read[hash] for hash in hashes]

    def read(self, hashes: Iterable[str]) -> dict[str, Kernel]:
        """Those kernels, disassembled together: most of what the disassembler takes is its start."""
        kernels = {hash: self._compiled[hash] for hash in hashes}
        codes = [_code(kernel.asm["cubin"]) for kernel in kernels.values()]
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(b"".join(codes))
            file.flush()
            kind = f"SM{self.arch}a" if self.arch == 90 else f"SM{self.arch}"
            text = _output(nvidia.nvdisasm.path, "-b", kind, file.name) if codes else ""
        instructions = [found.groups() for line in text.splitlines() if (found := _INSTRUCTION.match(line))]
        assert len(instructions) * _BYTES == sum(map(len, codes))
        found, start = {}, 0
        for (hash, kernel), code in zip(kernels.items(), codes, strict=True):
            end = start + len(code) // _BYTES
            found[hash] = _inspect(kernel, *find_loops(instructions[start:end], start))
            start = end
        return found


def _code(cubin: bytes) -> bytes:
    """The instructions in a cubin, an ELF file: its sections of text, end to end."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<3H", cubin, 0x3A)
    # name, type, flags, address, offset, size, ...
    sections = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(number)]
    first_name = sections[names][4]
    return b"".join(
        cubin[section[4] : section[4] + section[5]]
        for section in sections
        if cubin.startswith(b".text.", first_name + section[0])
    )


def find_loops(instructions: list[tuple[str, str]], start: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Opcodes in the order of the text, and loops as (first, last): from the target of a jump back to it.

    `instructions` are (opcode, operands) of one kernel, which follows `start` others in its text.
    """
    loops = set()
    for at, (opcode, rest) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)\s*;?\s*$", rest) if opcode.startswith("BRA") else None
        if target and start <= (first := int(target[1], 16) // _BYTES) <= start + at:
            loops.add((first - start, at))
    return [opcode for opcode, _ in instructions], sorted(loops)


def _inspect(kernel: CompiledKernel, opcodes: list[str], loops: list[tuple[int, int]]) -> Kernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(nvidia.cuobjdump.path, "-res-usage", file.name)
    registers = [int(n) for n in re.findall(r"REG:(\d+)", usage)]
    is_matrix = [re.match("H?G?MMA|[HID]MMA", opcode) is not None for opcode in opcodes]
    is_spill = [re.match("LDL|STL", opcode) is not None for opcode in opcodes]
    with_matrix = [(first, last) for first, last in loops if any(is_matrix[first : last + 1])]
    hot = with_matrix or loops
    innermost = [
        (first, last)
        for first, last in hot
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in hot)
    ]
    inside = {at for first, last in innermost for at in range(first, last + 1)}
    return Kernel(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        kernel.metadata.shared,
        max(registers),
        Counter(opcodes),
        sum(is_spill),
        sum(is_spill[at] for at in inside),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
