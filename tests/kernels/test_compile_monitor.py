"""What gets compiled is seen, by name and reason; with a stand-in for a GPU, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import torch, triton
sys.path.insert(0, {tests!r})
from helpers.no_gpu import NoGpu
from octavo.kernels import silu_and_mul
from octavo.kernels.triton.monitor import UnexpectedCompile, forbid_compiles, watch

seen = []
others = []
triton.knobs.runtime.jit_post_compile_hook = lambda **what: others.append(what["fn"].name)
with NoGpu(90):
    with watch() as made:
        silu_and_mul(torch.zeros(4, 64))
        first = len(made)
        silu_and_mul(torch.zeros(5, 64))  # another number of tokens is no other kernel
        seen += [first, len(made), made[0].kernel, made[0].key, made[0].from_disk, made[0].seconds > 0]
        with watch() as inner:
            silu_and_mul(torch.zeros(5, 96))
        seen += [len(inner), len(made)]
    silu_and_mul(torch.zeros(5, 64, dtype=torch.bfloat16))
    seen.append(len(made))  # nobody watches
    with forbid_compiles():
        silu_and_mul(torch.zeros(7, 64))
    try:
        with forbid_compiles():
            silu_and_mul(torch.zeros(7, 64, dtype=torch.float16))
    except UnexpectedCompile as error:
        seen.append(str(error))
    seen.append(others)
print(json.dumps(seen))
"""


def test_every_specialisation_is_seen_once_and_named(tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run(
        (sys.executable, "-c", script),
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, same, name, key, from_disk, took_time, inner, outer, unwatched, message, others = json.loads(
        done.stdout
    )
    assert (first, same) == (1, 1)
    assert name == "_silu_and_mul"
    assert "x:*fp32:16" in key
    assert "num_warps=" in key
    assert (from_disk, took_time) == (False, True)
    assert (inner, outer, unwatched) == (1, 2, 2)
    assert message.startswith("compiled after warm-up, 1 in all:\n  _silu_and_mul: x:*fp16:16 ")
    assert others == ["_silu_and_mul"] * 4  # the hook that was there before is still called
