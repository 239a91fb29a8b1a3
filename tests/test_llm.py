"""The door: what it takes, what it gives, and what it says to bad input. A tiny random model."""

from __future__ import annotations

import gc
import json
import logging
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from helpers.models import saved, tiny_hf_model
from helpers.text import letters_backend

from octavo import LLM, CapacityError, ConfigError, EngineError, ModelError, RequestError, SamplingParams
from octavo.engine.core import _mix
from octavo.llm import _process_age_s

CHAT_TEMPLATE = """{% for m in messages -%}
{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"""
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    saved(tiny_hf_model("llama", max_position_embeddings=64, bos_token_id=None, eos_token_id=7), path)
    letters_backend(52).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "temperature": 0.7, "max_new_tokens": 5})
    )
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_blocks=64, block_size=4) as llm:
        yield llm


def ids(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False, **options)]


@pytest.mark.parametrize(
    ("prompt", "place", "got"),
    [
        ([np.array([1, 2, 3])], 0, "array([1, 2, 3]) (ndarray)"),
        ([1, np.array([2, 3])], 1, "array([2, 3]) (ndarray)"),
        ([1, np.float64(2)], 1, "np.float64(2.0) (float64)"),
        ([True], 0, "True (bool)"),
    ],
)
def test_what_is_no_token_id_is_named(llm: LLM, prompt: Any, place: int, got: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"prompt_token_ids[{place}] must be an int, got {got}")):
        ids(llm, prompt)


def test_integers_of_numpy_are_token_ids(llm: LLM) -> None:
    token_ids = llm.tokenizer.encode("hello")
    assert ids(llm, [np.int64(token_id) for token_id in token_ids]) == ids(llm, token_ids)


def test_one_or_many_text_or_ids_give_the_same(llm: LLM) -> None:
    (expected,) = ids(llm, "hello")
    assert len(expected) == 8
    token_ids = llm.tokenizer.encode("hello")
    for prompt in (
        "hello",
        token_ids,
        tuple(token_ids),
        {"prompt": "hello"},
        {"prompt_token_ids": token_ids},
    ):
        assert ids(llm, prompt) == [expected]
        assert ids(llm, [prompt, prompt]) == [expected, expected]
    assert ids(llm, []) == []


def test_params_one_for_all_one_each_or_the_models_own(llm: LLM) -> None:
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    assert [len(out) for out in ids(llm, ["ab", "cd"], [short, GREEDY])] == [2, 8]
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, max_tokens=5)
    assert all(len(out) <= 5 for out in ids(llm, ["ab"], None))
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts; give one"):
        llm.generate(["a", "b"], [short])
    with pytest.raises(RequestError, match=r"sampling_params\[0\] must be SamplingParams, got"):
        llm.generate(["a"], [{"temperature": 1}])  # type: ignore[list-item]  # what a user might try


def test_every_eos_of_the_generation_config_ends_a_text(llm: LLM) -> None:
    biased = SamplingParams(max_tokens=8, logit_bias={9: 100.0})
    (output,) = llm.generate("abc", biased, use_tqdm=False)
    assert output.token_ids == [9]
    assert output.finish_reason == "stop"
    assert output.text == ""


def test_chat_renders_the_template_once(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "uhia"
    assert output.prompt_token_ids == llm.tokenizer.encode("uhia", add_special_tokens=False)
    assert output.token_ids == ids(llm, "uhia")[0]
    both = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [o.token_ids for o in both] == [output.token_ids] * 2
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], GREEDY)


def test_streams_join_to_the_output_and_run_side_by_side(llm: LLM) -> None:
    expected = llm.generate(["hello", "world"], GREEDY, use_tqdm=False)
    streams = [llm.stream(word, GREEDY) for word in ("hello", "world")]
    pieces: list[list[Any]] = [[], []]
    for chunks in zip(*streams, strict=True):
        for mine, chunk in zip(pieces, chunks, strict=True):
            mine.append(chunk)
    for mine, stream, output in zip(pieces, streams, expected, strict=True):
        assert "".join(chunk.text for chunk in mine) == output.text
        assert [t for chunk in mine for t in chunk.token_ids] == output.token_ids
        assert stream.output is not None
        assert stream.output.token_ids == output.token_ids
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert "".join(c.text for c in llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY)) == chat.text


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    with llm.stream("hello", endless) as stream:
        next(stream)
        assert llm.stats().num_owned_blocks > 0
    assert llm.stats().num_owned_blocks == 0
    stream = llm.stream("hello", endless)
    next(stream)
    del stream
    assert llm.stats().num_owned_blocks == 0
    assert llm.stats().num_running == 0


def test_outputs_carry_logprobs_and_times(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert all(entry[token].rank == 1 for entry, token in zip(output.logprobs, output.token_ids, strict=True))
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == output.prompt_token_ids[1:]
    metrics = output.metrics
    assert metrics.queue_s is not None
    assert metrics.ttft_s is not None
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.e2e_s
    # Chunked at 3 tokens, the prompt's log probabilities are the same.
    with LLM(llm.config.model, num_blocks=64, block_size=4, max_num_batched_tokens=3) as chunked:
        (other,) = chunked.generate("hello", params, use_tqdm=False)
    assert other.prompt_logprobs == output.prompt_logprobs
    assert other.logprobs == output.logprobs


def test_loading_says_how_long_each_stage_took(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    LLM(folder, num_blocks=64, block_size=4).close()
    expected = (
        r"imports done, \d+\.\d s after the process began",
        r"device cpu in \d+\.\d s",
        r"tokenizer in \d+\.\d s",
        r"weights: .* KiB in \d+\.\d s",
        r"KV cache in \d+\.\d s: 64 blocks in .*",
        r"first steps in \d+\.\d s",
        r"ready in \d+\.\d s",
    )
    assert re.fullmatch("\n".join(expected), "\n".join(record.getMessage() for record in caplog.records))


def test_second_run_hits_the_prefix_cache_and_salt_separates(folder: Path) -> None:
    with LLM(folder, num_blocks=64, block_size=4) as llm:
        cached = [
            llm.generate("abcdefghi", GREEDY, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens
            for salt in ("", "", "x", "x")
        ]
        assert cached == [0, 8, 0, 8]
    with LLM(folder, num_blocks=64, block_size=4, enable_prefix_caching=False) as llm:
        assert [llm.generate("abcdefghi", GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_first_bad_prompt_is_named_and_nothing_runs(llm: LLM) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt is empty"):
        llm.generate(["ok", ""], GREEDY)
    with pytest.raises(RequestError, match=r"^prompt is empty"):
        llm.generate([[]], GREEDY)
    with pytest.raises(RequestError, match=r"prompts\[2\]: prompt_token_ids\[0\] is 101, outside"):
        llm.generate([[1], [2], [101]], GREEDY)
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt has 64 tokens; max_model_len=64"):
        llm.generate(["a", "b" * 64], GREEDY)
    with pytest.raises(RequestError, match="a prompt must be text or a list of token ids, got int"):
        llm.generate(["a", 3], GREEDY)  # type: ignore[list-item]  # what a user might try
    with pytest.raises(RequestError, match="prompts must be text, token ids or a list of those, got int"):
        llm.generate(3, GREEDY)  # type: ignore[arg-type]  # what a user might try
    with pytest.raises(RequestError, match="exactly one of 'prompt' and 'prompt_token_ids'"):
        llm.generate({"text": "a"}, GREEDY)
    with pytest.raises(RequestError, match="logit_bias names token id 101"):
        llm.generate("a", SamplingParams(logit_bias={101: 1.0}))
    stats = llm.stats()
    assert (stats.num_steps, stats.num_waiting, stats.num_owned_blocks) == (steps, 0, 0)
    assert len(ids(llm, "b" * 63)[0]) == 1
    assert len(ids(llm, "b" * 62)[0]) == 2


def test_prompt_above_the_cache_is_refused_at_once(folder: Path) -> None:
    with LLM(folder, num_blocks=4, block_size=4) as llm:
        with pytest.raises(CapacityError, match=r"prompts\[0\]: prompt has 17 tokens; the KV cache holds 16"):
            llm.generate(["a" * 17, "b"], GREEDY)
        assert [len(out) for out in ids(llm, ["a" * 16, "b"])] == [1, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, r"unknown engine option 'max_num_seq' \(did you mean 'max_num_seqs'\?\)"),
        ({"block_size": 12}, "block_size must be a power of two, got 12"),
        ({"block_size": 0}, r"block_size must be from 1 to 2\*\*40, got 0"),
        ({"num_blocks": 4, "kv_cache_memory": "1GiB"}, "give only one"),
        ({"kv_cache_memory": "a lot"}, "memory must be a positive size such as '24GiB'"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of 'auto', .*, 'fp8', 'int8'; got 'fp4'"),
        (
            {"kv_cache_dtype": "fp8", "device": "cpu"},
            "kv_cache_dtype='fp8' needs a GPU; on a CPU use 'float16'",
        ),
        ({"quantization": "int4"}, "quantization must be one of None, 'float16', 'int8'; got 'int4'"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "cannot be combined with dtype='bfloat16'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported yet"),
        ({"max_model_len": 65}, r"max_model_len: expected 1 to 64, the positions of .*, got 65"),
        ({"device": "gpu"}, "device must be one of 'auto', 'cpu', 'cuda'; got 'gpu'"),
        ({"max_prefill_share": 0}, "max_prefill_share must be above 0"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False"),
        ({"seed": 1.5}, "seed must be an int"),
        ({"num_blocks": 10**5000}, r"num_blocks must be from 1 to 2\*\*40, got a number beyond it"),
        ({"block_size": 2**70}, r"block_size must be from 1 to 2\*\*40"),
        ({"num_threads": 10**6}, "num_threads must be an int from 1 to"),
        ({"kv_cache_memory": "9" * 5000}, "memory must be a positive size"),
        ({"trace": ""}, "trace must be the path of a file to write, got ''"),
        ({"trace": 5}, "trace must be the path of a file to write, got 5"),
        ({"trace": "a\0b"}, "trace: cannot write .* null"),
    ],
)
def test_bad_options_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **options)


def test_memory_too_small_for_one_block_says_what_would_fit(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_cache_memory is 10 bytes.* 12,288 bytes.* 49,152 bytes"):
        LLM(folder, kv_cache_memory=10)


@pytest.mark.parametrize("stat", ["", "1 (python) S 0"])
def test_a_system_that_tells_no_age_of_the_process_is_none_to_fail_for(
    monkeypatch: pytest.MonkeyPatch, stat: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: stat)
    assert _process_age_s() is None


def test_an_unknown_architecture_is_said_before_a_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "banana"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="unknown model_type 'banana'"):
        LLM(tmp_path)


def test_dummy_weights_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(tmp_path)
    with LLM(tmp_path, load_format="dummy", num_blocks=8) as llm:
        (output,) = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        assert len(output.token_ids) == 8
        assert output.text == ""
        with pytest.raises(ModelError, match="has no tokenizer; give prompts as token ids"):
            llm.generate("text")
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            llm.generate([1], SamplingParams(stop="x"))


def test_dummy_weights_of_a_repository_fetch_no_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def snapshot_download(repo_id: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (repo_id, revision) == ("owner/name", "abc")
        fetched.extend(allow_patterns)
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with LLM("owner/name", revision="abc", load_format="dummy", num_blocks=8) as llm:
        assert len(ids(llm, [1, 2, 3])[0]) == 8
    assert fetched == ["*.json", "*.jinja", "additional_chat_templates/*.jinja"]


def test_the_rope_table_is_as_long_as_max_model_len(folder: Path, llm: LLM) -> None:
    with LLM(folder, num_blocks=16, max_model_len=24) as short:
        assert ids(short, "hello") == ids(llm, "hello")
        lengths = [len(each.engine.runner.model.layers[0].attention.rope_table) for each in (short, llm)]
    assert lengths == [24, 64]


def test_closed_engine_says_so(folder: Path) -> None:
    llm = LLM(folder, num_blocks=8)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def test_a_closed_engine_holds_neither_weights_nor_cache(folder: Path) -> None:
    llm = LLM(folder, num_blocks=8)
    ids(llm, "hello")
    runner = llm.engine.runner
    held = [weakref.ref(runner.model), *(weakref.ref(tensor) for tensor in runner.kv_cache.layers[0][:2])]
    del runner
    llm.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]
    assert llm.stats().num_steps == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs_and_reports_its_cache(folder: Path, dtype: str) -> None:
    with LLM(folder, num_blocks=16, dtype=dtype) as llm:
        assert len(ids(llm, "hello")[0]) == 8
        assert (llm.config.dtype, llm.config.kv_cache_dtype) == (dtype, dtype)
        kv_cache = llm.engine.runner.kv_cache
        assert str(kv_cache.layers[0][0].dtype) == f"torch.{dtype}"
        assert kv_cache.nbytes == 16 * 16 * 2 * 3 * 2 * 16 * 2


def test_kv_dtype_apart_from_the_models(folder: Path, llm: LLM) -> None:
    with LLM(folder, num_blocks=16, kv_cache_dtype="float16") as half:
        assert half.config.dtype == "float32"
        assert half.engine.runner.kv_cache.nbytes == 16 * 16 * 2 * 3 * 2 * 16 * 2
        assert ids(half, "hello")[0][:3] == ids(llm, "hello")[0][:3]


def test_calls_that_nano_vllm_users_have_in_their_fingers(folder: Path) -> None:
    with LLM(str(folder), enforce_eager=True, tensor_parallel_size=1) as llm:
        outputs = llm.generate(["introduce", "list"], SamplingParams(temperature=0.6, max_tokens=4))
        assert all(isinstance(output.text, str) and len(output.token_ids) <= 4 for output in outputs)
    with LLM(str(folder), enforce_eager=False, max_model_len=48) as llm:
        prompts = [[1, 2, 3], [4] * 20]
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in (5, 9)]
        llm.generate(["Benchmark"], SamplingParams())
        assert [len(o.token_ids) for o in llm.generate(prompts, params, use_tqdm=False)] == [5, 9]


def test_followers_see_the_prompt_from_their_first_token_on(llm: LLM) -> None:
    greedy = {"max_tokens": 6, "ignore_eos": True, "repetition_penalty": 3.0}
    (alone,) = llm.generate("hello", SamplingParams(**greedy), use_tqdm=False)
    (three,) = llm.generate("hello", SamplingParams(n=3, **greedy), use_tqdm=False)
    assert [o.token_ids for o in three.outputs] == [alone.token_ids] * 3
    drawn = SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate("hello", drawn, use_tqdm=False)
    for completion in output.outputs[1:]:
        seed = _mix(1, completion.index)
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=6, ignore_eos=True)
        assert ids(llm, "hello", params) == [completion.token_ids]


def test_stream_lost_in_a_cycle_is_aborted_at_the_next_chance(llm: LLM) -> None:
    stream: Any = llm.stream("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    stream.itself = stream
    del stream
    gc.collect()
    assert llm.stats().num_running == 0
    assert llm.stats().num_owned_blocks == 0


@pytest.mark.parametrize("model", [None, 5, b"x", ["a"]])
def test_a_model_that_is_no_path_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="model must be a path or a name, got"):
        LLM(model)


@pytest.mark.parametrize(
    "options", [{"num_blocks": 10**12}, {"kv_cache_memory": "1000TiB"}, {"block_size": 2**39}]
)
def test_a_cache_that_cannot_be_had_says_what_can(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(CapacityError, match=r"are available: at most|too small"):
        LLM(folder, **options)


def test_extreme_options_end_nobody_else(llm: LLM) -> None:
    (alone,) = ids(llm, "hello")
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e39, "min_tokens": 3, "stop_token_ids": [5]},
        {"temperature": 1e308, "top_k": 5},
    ]
    for extreme in extremes:
        params = [GREEDY, SamplingParams(max_tokens=8, **extreme)]
        outputs = llm.generate(["hello", "bad"], params, use_tqdm=False)
        assert outputs[0].token_ids == alone
        assert outputs[1].error is None
        assert all(0 <= token < 101 for token in outputs[1].token_ids)


def test_a_billion_continuations_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n=1000000000 sequences can never run at once; the limit is"):
        llm.generate("a", SamplingParams(n=10**9))


@pytest.mark.parametrize("prompt", [bytearray(b"abc"), memoryview(b"abc"), b"abc"])
def test_bytes_are_no_token_ids(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="must be text"):
        llm.generate(prompt)
    with pytest.raises(RequestError, match="must be text or a list of token ids"):
        llm.generate([prompt])


def test_keys_of_dict_prompts_mean_what_they_say(llm: LLM) -> None:
    for prompt in ({"prompt_token_ids": "hello"}, {"prompt": [1, 2]}):
        with pytest.raises(RequestError, match="'prompt' must be text and 'prompt_token_ids' a list of ints"):
            llm.generate(prompt)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "hi"}, "hi", 5, None, iter([])])
def test_messages_must_be_a_list(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages must be a list of messages"):
        llm.chat(messages)


def test_two_threads_in_one_engine_are_told_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.runner
    launch = runner.launch
    errors: list[str] = []

    def intrude(plan: Any) -> Any:
        for call in (llm.engine.step, lambda: llm.engine.add_request([1], GREEDY)):
            with pytest.raises(EngineError, match="another thread") as caught:
                call()
            errors.append(str(caught.value))
        return launch(plan)

    monkeypatch.setattr(runner, "launch", intrude)
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert len(output.token_ids) == 8
    assert len(errors) == 16
