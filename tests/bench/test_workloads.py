import math
import random
import re

import pytest

from octavo.bench.workloads import WorkloadShape, random_workload, shared_prefix_workload
from octavo.errors import ConfigError


def test_the_default_is_the_nano_vllm_benchmark_token_for_token():
    rng = random.Random()
    rng.seed(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    output_lens = [rng.randint(100, 1024) for _ in range(256)]

    workload = random_workload(WorkloadShape())

    assert workload.prompts == prompts
    assert workload.output_lens == output_lens
    # The totals that nano-vllm's own README line is computed from.
    assert workload.num_output_tokens == 133_966
    assert workload.num_input_tokens == sum(map(len, prompts))


def test_scaling_changes_counts_and_lengths():
    shape = WorkloadShape().scaled(0.125)
    assert (shape.num_seqs, shape.min_input, shape.max_input, shape.prefix_len) == (32, 12, 128, 64)
    assert shape.num_prefixes == 4
    workload = random_workload(shape)
    assert len(workload.prompts) == 32
    assert {12 <= len(prompt) <= 128 for prompt in workload.prompts} == {True}
    assert WorkloadShape().scaled(1e-9).num_seqs == 1


def test_shared_prefixes_are_shared_and_the_rest_is_not():
    shape = WorkloadShape(num_seqs=6, min_input=3, max_input=5, num_prefixes=2, prefix_len=8)
    workload = shared_prefix_workload(shape)
    starts = [tuple(prompt[:8]) for prompt in workload.prompts]
    assert starts[0] == starts[2] == starts[4]
    assert starts[1] == starts[3] == starts[5]
    assert starts[0] != starts[1]
    assert len({tuple(prompt[8:]) for prompt in workload.prompts}) == 6
    assert all(11 <= len(prompt) <= 13 for prompt in workload.prompts)


def test_the_model_length_fits_the_longest_request():
    workload = random_workload(WorkloadShape(num_seqs=20, max_input=200, max_output=150))
    longest = max(len(p) + n for p, n in zip(workload.prompts, workload.output_lens, strict=True))
    assert workload.max_model_len == longest


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_seqs": 0}, "num_seqs must be at least 1, got 0"),
        ({"min_input": 9, "max_input": 8}, "min_input must not be above max_input, got 9 and 8"),
    ],
)
def test_impossible_shapes_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        WorkloadShape(**wrong)


@pytest.mark.parametrize("factor", [0, -1, math.nan, math.inf, 1e300])
def test_scale_must_be_positive_and_not_absurd(factor):
    with pytest.raises(
        ConfigError, match=f"scale must be above 0 and at most 1000, got {re.escape(str(factor))}"
    ):
        WorkloadShape().scaled(factor)
