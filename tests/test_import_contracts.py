"""What import-linter cannot see: what really gets loaded when a door is opened."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "transformers", "triton", "tokenizers")


def loaded_by(statement: str) -> set[str]:
    """Top-level and octavo modules in sys.modules after `statement` ran in a fresh interpreter."""
    script = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "octavo",
        "octavo.cache.manager",
        "octavo.cache.spec",
        "octavo.cache.sizing",
        "octavo.engine.request",
        "octavo.engine.schedule",
        "octavo.engine.scheduler",
        "octavo.models.config",
        "octavo.models.source",
        "octavo.config",
        "octavo.sampling_params",
        "octavo.outputs",
        "octavo.errors",
        "octavo.bench.report",
        "octavo.bench.workloads",
        "octavo.cli.main",
        "octavo.cli.generate",
        "octavo.cli.chat",
        "octavo.cli.bench",
        "octavo.cli.doctor",
        "octavo.cli.kv",
        "octavo.cli.serve",
        "octavo.serve.messages",
        "octavo.serve.settings",
    ],
)
def test_host_code_loads_nothing_heavy(module):
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_the_probe_would_see_torch():
    assert "torch" in loaded_by("import octavo.cache.storage")


def test_the_package_opens_its_names_only_when_asked():
    modules = loaded_by("import octavo; octavo.SamplingParams")
    assert "octavo.sampling_params" in modules
    assert modules.isdisjoint({"torch", "octavo.llm", "octavo.engine"})


def test_text_loads_neither_torch_nor_transformers():
    modules = loaded_by("import octavo.text.tokenizer, octavo.text.chat, octavo.text.detokenizer")
    assert modules.isdisjoint({"torch", "transformers"})


def test_the_kernel_door_does_not_open_the_engine():
    modules = loaded_by("from octavo.kernels import flash_attn_varlen_func, write_kv_cache")
    rooms = {name.split(".")[1] for name in modules if name.startswith("octavo.")}
    assert rooms == {"errors", "kernels"}
    assert modules.isdisjoint({"transformers", "triton"})


def test_a_kernel_call_on_the_cpu_loads_no_triton():
    modules = loaded_by(
        "import torch; from octavo.kernels import silu_and_mul; silu_and_mul(torch.zeros(1, 2))"
    )
    assert "triton" not in modules
    assert "octavo.kernels.cpu.activation" in modules


HELP = """
import contextlib, io
from octavo.__main__ import main
sys.argv = ["octavo", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main()
assert "doctor" in shown.getvalue()
"""


def test_the_help_of_the_command_loads_nothing_heavy():
    assert loaded_by(HELP).isdisjoint(HEAVY)


def test_the_engine_runs_without_transformers():
    assert "transformers" not in loaded_by("import octavo.llm, octavo.models.registry")
