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


def test_the_engine_is_imported_without_garbage_collections_and_nothing_else_changes():
    code = """
import gc
import octavo

collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
octavo.LLM
print(len(collections) < 5, gc.isenabled(), gc.get_freeze_count())
"""
    done = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "0"]
