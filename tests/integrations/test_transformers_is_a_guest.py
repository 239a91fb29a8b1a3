"""Octavo without Transformers, or with one that is too old."""

import subprocess
import sys

import pytest


def run(script):
    return subprocess.run((sys.executable, "-c", script), capture_output=True, text=True)


def test_without_transformers_only_this_door_is_shut_and_says_what_opens_it():
    hidden = "import sys; sys.modules['transformers'] = None\n"
    assert run(hidden + "import octavo, octavo.kernels, octavo.integrations").returncode == 0
    done = run(hidden + "import octavo.integrations.transformers")
    assert "ImportError: octavo.integrations.transformers needs Transformers: pip install" in done.stderr


@pytest.mark.parametrize(("version", "is_taken"), [("4.57.1", False), ("5.16.2", False), ("5.17.0", True)])
def test_a_version_that_is_too_old_is_named(version, is_taken):
    pretend = f"import transformers; transformers.__version__ = '{version}'\n"
    done = run(pretend + "import octavo.integrations.transformers")
    if is_taken:
        assert done.returncode == 0, done.stderr
    else:
        assert f"needs Transformers 5.17 or newer and found {version}" in done.stderr


def test_octavo_loads_nothing_of_this_room():
    done = run(
        "import sys, octavo.llm, octavo.kernels, octavo.models.registry\n"
        "print([m for m in sys.modules if m.startswith(('octavo.integrations', 'transformers'))])"
    )
    assert done.stdout.strip() == "[]"


def test_both_names_are_known_and_the_old_one_still_works():
    from helpers.hf_generation import tiny_model
    from transformers import AttentionInterface, AttentionMaskInterface

    assert {"octavo", "paged|octavo"} <= set(AttentionInterface().valid_keys())
    assert "octavo" in AttentionMaskInterface().valid_keys()
    assert tiny_model("qwen3").config._attn_implementation == "octavo"
