"""SamplingParams: defaults, what is refused and how the refusal reads, generation_config.json."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, eos_token_ids


def test_defaults_are_greedy_and_neutral():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "max_tokens": 256,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logit_bias": {},
        "allowed_token_ids": None,
        "structured_output": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
    }
    assert params.is_greedy


def test_nano_vllm_call():
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=100)
    assert (params.temperature, params.ignore_eos, params.max_tokens) == (0.6, True, 100)
    assert repr(params) == "SamplingParams(temperature=0.6, max_tokens=100, ignore_eos=True)"


def test_repr_of_the_defaults_is_short():
    assert repr(SamplingParams()) == "SamplingParams()"


def test_values_are_normalised():
    bias = {3: 5}
    params = SamplingParams(
        top_k=-1,
        seed=-1,
        stop="END",
        stop_token_ids=[7, 8],
        allowed_token_ids=[1, 2],
        logit_bias=bias,
        temperature=1,
    )
    assert (params.top_k, params.seed, params.stop) == (0, None, ("END",))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((7, 8), (1, 2))
    assert isinstance(params.temperature, float)
    bias[4] = 1
    assert params.logit_bias == {3: 5.0}
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_is_a_value():
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=["a", "b"])
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).n == 2
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3


def test_unknown_option_names_the_nearest():
    with pytest.raises(RequestError, match=r"no option 'temprature' \(did you mean 'temperature'\?\)"):
        SamplingParams(temprature=0.5)


REFUSED = [
    ({"n": 0}, "n must be at least 1, got 0"),
    ({"n": True}, "n must be an integer, got True (bool)"),
    ({"n": 1.5}, "n must be an integer, got 1.5 (float)"),
    ({"n": 10**30}, "n must be between 1 and 9223372036854775807, got 1000000000"),
    ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
    ({"temperature": float("nan")}, "temperature must be finite, got nan"),
    ({"temperature": float("inf")}, "temperature must be finite, got inf"),
    ({"temperature": 10**400}, "temperature must be finite, got inf"),
    ({"temperature": "0.5"}, "temperature must be a number, got '0.5' (str)"),
    ({"temperature": False}, "temperature must be a number, got False (bool)"),
    ({"temperature": None}, "temperature must be a number, got None (NoneType)"),
    ({"top_k": "8"}, "top_k must be an integer, got '8' (str)"),
    ({"top_k": -2}, "top_k must be at least -1, got -2"),
    ({"top_k": 8.0}, "top_k must be an integer, got 8.0 (float)"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
    ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
    ({"top_p": float("nan")}, "top_p must be finite, got nan"),
    ({"min_p": -0.1}, "min_p must be at least 0 and at most 1, got -0.1"),
    ({"min_p": 1.1}, "min_p must be at least 0 and at most 1, got 1.1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be at least 1e-06 and at most 1e+06, got 0"),
    ({"presence_penalty": 2.5}, "presence_penalty must be at least -2 and at most 2, got 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty must be at least -2 and at most 2, got -2.5"),
    (
        {"seed": 2**63},
        "seed must be between -9223372036854775808 and 9223372036854775807, got 9223372036854775808",
    ),
    ({"seed": 1.0}, "seed must be an integer, got 1.0 (float)"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": True}, "max_tokens must be an integer, got True (bool)"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens (9) is above max_tokens (8)"),
    ({"stop": ""}, "stop holds an empty string"),
    ({"stop": ["a", ""]}, "stop holds an empty string"),
    ({"stop": "\ud800"}, r"stop holds '\ud800', which is not valid Unicode and can match nothing; remove it"),
    ({"stop": ["a", "b\udfff"]}, r"stop holds 'b\udfff', which is not valid Unicode"),
    ({"stop": 0}, "stop must be a string or a list of strings, got 0"),
    ({"stop": [1]}, "stop must be a string or a list of strings, got [1]"),
    ({"stop": b"x"}, "stop must be a string or a list of strings, got b'x'"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5 (int)"),
    ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids, got '12' (str)"),
    ({"stop_token_ids": 0}, "stop_token_ids must be a list of token ids, got 0 (int)"),
    ({"stop_token_ids": False}, "stop_token_ids must be a list of token ids, got False (bool)"),
    ({"stop_token_ids": ""}, "stop_token_ids must be a list of token ids, got '' (str)"),
    (
        {"stop_token_ids": np.array(1)},
        "stop_token_ids must be a list of token ids, got array(1) (ndarray)",
    ),
    ({"stop_token_ids": [1, -1]}, "each id in stop_token_ids must be at least 0, got -1"),
    ({"stop_token_ids": [True]}, "each id in stop_token_ids must be an integer, got True (bool)"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1 (int)"),
    ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None (NoneType)"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [2.0]}, "each id in allowed_token_ids must be an integer, got 2.0 (float)"),
    (
        {"allowed_token_ids": [2], "stop_token_ids": [2, 3], "min_tokens": 1},
        "min_tokens (1) forbids stop_token_ids",
    ),
    ({"logit_bias": [1]}, "logit_bias must be a dict of token id to number, got [1]"),
    ({"logit_bias": {-1: 5}}, "each key of logit_bias must be at least 0, got -1"),
    ({"logit_bias": {"abc": 5}}, "each key of logit_bias must be an integer, got 'abc' (str)"),
    ({"logit_bias": {0: 1e9}}, "logit_bias[0] must be at least -100 and at most 100, got 1e+09"),
    ({"logit_bias": {0: float("-inf")}}, "logit_bias[0] must be finite, got -inf"),
    ({"logprobs": -2}, "logprobs (-1 for all) must be between -1 and 1024, got -2"),
    ({"logprobs": True}, "logprobs (-1 for all) must be an integer, got True (bool)"),
    ({"prompt_logprobs": 1025}, "prompt_logprobs (-1 for all) must be between -1 and 1024, got 1025"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_refused(options, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "\ud800" * 10**6, 10**5000, -(10**5000), [10**5000]],
    ids=["text", "surrogates", "int", "negative", "list"],
)
@pytest.mark.parametrize("name", [*SamplingParams.__dataclass_fields__, "unknown"])
def test_a_refusal_is_short_whatever_the_value(name, value):
    key = name + "x" * 10**5 if name == "unknown" else name
    if name == "stop" and value == "x" * 10**6:
        value = [value, 1]  # alone it is a stop string like any other
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{key: value})
    assert len(str(caught.value)) < 400


def test_keys_and_ids_are_shown_short():
    with pytest.raises(RequestError, match="each key of logit_bias must be between 0 and 9223"):
        SamplingParams(logit_bias={10**5000: 1})
    with pytest.raises(RequestError, match="each id in stop_token_ids must be between 0 and 9223"):
        SamplingParams(stop_token_ids=[10**5000])


def test_ids_may_come_in_an_array():
    assert SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)


def test_options_go_by_name():
    with pytest.raises(RequestError, match=r"by name, as in SamplingParams\(temperature=0.5\); got 1"):
        SamplingParams(1)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},  # greedy copies: pointless, but a test of forking rests on it
        {"temperature": 1e-9, "top_k": 5},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 8, "max_tokens": 8},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {5: 100, 6: -100}, "allowed_token_ids": [1]},
        {"logprobs": 0, "prompt_logprobs": -1},
    ],
    ids=str,
)
def test_accepted_at_the_edge(options):
    assert SamplingParams(**options) != SamplingParams()


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_past_the_vocabulary_are_named(name):
    """vllm#16529, sglang#7670: an id equal to the vocabulary size killed the engine."""

    def params(token):
        return SamplingParams(**{name: {token: 5.0} if name == "logit_bias" else [token]})

    params(99).validate_for(vocab_size=100, max_model_len=64)
    with pytest.raises(RequestError, match=rf"{name} names token id 100, outside the vocabulary \(0 to 99\)"):
        params(100).validate_for(vocab_size=100, max_model_len=64)


def test_min_tokens_must_fit_the_context():
    SamplingParams(min_tokens=63, max_tokens=None).validate_for(vocab_size=100, max_model_len=64)
    with pytest.raises(RequestError, match=r"min_tokens \(64\) cannot be reached"):
        SamplingParams(min_tokens=64, max_tokens=None).validate_for(vocab_size=100, max_model_len=64)


def test_generation_config_of_qwen3():
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [151645, 151643],
    }
    assert SamplingParams.from_generation_config(config) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95
    )
    assert SamplingParams.from_generation_config(config, temperature=0.0, max_tokens=9) == SamplingParams(
        temperature=0.0, top_k=20, top_p=0.95, max_tokens=9
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"_from_model_config": True, "bos_token_id": 1, "transformers_version": "4.42"}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.7}, SamplingParams(temperature=0.7)),
        ({"temperature": None, "top_k": None, "do_sample": None}, SamplingParams()),
        (
            {"min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 2048},
            SamplingParams(min_p=0.1, repetition_penalty=1.1, max_tokens=2048),
        ),
    ],
    ids=str,
)
def test_generation_config(config, expected):
    assert SamplingParams.from_generation_config(config) == expected


def test_generation_config_is_checked_and_named_only_where_it_is_at_fault():
    with pytest.raises(RequestError, match=r"^the model's generation_config.json: top_p must be above 0"):
        SamplingParams.from_generation_config({"top_p": 0.0}, temperature=1.0)
    with pytest.raises(RequestError, match=r"^the model's .*: do_sample must be True or False, got 'no'"):
        SamplingParams.from_generation_config({"do_sample": "no"})
    with pytest.raises(RequestError, match=r"^top_p must be above 0"):
        SamplingParams.from_generation_config({"temperature": 1.0}, top_p=0.0)
    assert SamplingParams.from_generation_config({"top_p": 0.0}, top_p=0.5).top_p == 0.5
    with pytest.raises(RequestError, match=r"config must be a dict, as in .*, got None"):
        SamplingParams.from_generation_config(None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": 0}, (0,)), ({"eos_token_id": [2, 1]}, (2, 1))],
)
def test_eos_token_ids(config, expected):
    assert eos_token_ids(config) == expected


def test_eos_token_ids_refuses_text():
    with pytest.raises(RequestError, match="each id in eos_token_id must be an integer"):
        eos_token_ids({"eos_token_id": "</s>"})


def test_loads_no_torch():
    code = "import sys, octavo.sampling_params; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
