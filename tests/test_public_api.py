import subprocess
import sys

import octavo
from octavo import errors

EXPORTED = {
    "CapacityError",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "KernelArgumentError",
    "LLM",
    "ModelError",
    "OctavoError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedKernelConfig",
    "WeightsError",
    "__version__",
}


def test_the_public_names_are_a_list_and_each_resolves():
    assert set(octavo.__all__) >= EXPORTED
    assert len(octavo.__all__) == len(set(octavo.__all__))
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
        assert name in dir(octavo)


def test_every_error_is_public_and_an_octavo_error():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined <= set(octavo.__all__)
    assert all(issubclass(getattr(errors, name), errors.OctavoError) for name in defined)


def test_the_kernel_door():
    import octavo.kernels

    expected = {
        "apply_rotary",
        "embedding",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
        "gelu_tanh",
        "grouped_linear",
        "linear",
        "pack_experts",
        "pack_weight",
        "rms_norm",
        "silu_and_mul",
        "write_kv_cache",
    }
    assert expected <= set(octavo.kernels.__all__)
    for name in octavo.kernels.__all__:
        assert getattr(octavo.kernels, name) is not None


def test_the_library_prints_nothing_of_its_log_by_itself():
    code = "import logging, octavo; logging.getLogger('octavo.engine').error('a step failed')"
    done = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_what_the_engine_imports_is_kept_from_the_garbage_collector():
    """What was garbage before is freed, and whoever has torch, or no collector, keeps things as they are."""
    code = """
import gc, sys, weakref
import octavo

class Node:
    pass

node = Node()
node.itself, gone = node, weakref.ref(node)
del node
ways = sys.argv[1:]
if "torch first" in ways:
    import torch
if "no collector" in ways:
    gc.disable()
if "broken" in ways:
    sys.modules["octavo.engine.build"] = None
    try:
        octavo.LLM
    except ImportError:
        pass
else:
    octavo.LLM
print(gc.isenabled(), gone() is None, gc.get_freeze_count() > 100_000)
"""

    def seen(*ways: str) -> list[str]:
        done = subprocess.run((sys.executable, "-c", code, *ways), check=True, capture_output=True, text=True)
        return done.stdout.split()

    assert seen() == ["True", "True", "True"]
    assert seen("broken")[:2] == ["True", "True"]
    assert seen("torch first")[::2] == ["True", "False"]
    assert seen("no collector") == ["False", "False", "False"]
