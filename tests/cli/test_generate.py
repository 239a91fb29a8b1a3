import io
import json

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import shown

OPTIONS = ("--max-tokens", "6", "--ignore-eos")


def expected_text(folder, prompt, **params):
    with LLM(folder, load_format="dummy", num_threads=1, num_blocks=64) as llm:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, **params)
        return [c.text for c in llm.generate(prompt, sampling, use_tqdm=False)[0].outputs]


def test_one_raw_prompt_is_streamed(octavo, tiny):
    status, out, err = octavo("generate", *tiny, *OPTIONS, "--raw", "abc")
    assert (status, err) == (0, "")
    assert out == expected_text(tiny[0], "abc")[0] + "\n"


def test_the_chat_template_is_the_default_where_there_is_one(octavo, tiny):
    by_default = octavo("generate", *tiny, *OPTIONS, "abc")
    assert by_default == octavo("generate", *tiny, *OPTIONS, "--chat", "abc")
    assert by_default[1] == expected_text(tiny[0], "<user>abc\n<assistant>")[0] + "\n"


def test_the_system_message_stands_first(octavo, tiny):
    _, out, _ = octavo("generate", *tiny, *OPTIONS, "--system", "Be brief.", "abc", "--json")
    assert json.loads(out)["prompt"] == "<system>Be brief.\n<user>abc\n<assistant>"


def test_system_and_raw_contradict(octavo, tiny):
    status, _, err = octavo("generate", *tiny, "--raw", "--system", "x", "abc")
    assert status == 2
    assert "--system needs the chat template" in err


def test_a_system_message_without_a_template_is_refused(octavo, model_folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    status, out, err = octavo(
        "generate", tmp_path, "--load-format", "dummy", "--num-blocks", "64", "--system", "x", "abc"
    )
    assert (status, out) == (1, "")
    assert err == (
        f"octavo: error: --system needs a chat template and {tmp_path} has none; "
        "write it into the prompt instead\n"
    )


def test_several_prompts_are_told_apart(octavo, tiny):
    status, out, _ = octavo("generate", *tiny, *OPTIONS, "--raw", "abc", "xyz")
    first, second = expected_text(tiny[0], "abc")[0], expected_text(tiny[0], "xyz")[0]
    assert status == 0
    assert out == f"### abc\n{first}\n### xyz\n{second}\n"


def test_several_answers_are_numbered(octavo, tiny):
    arguments = ("--raw", "abc", "-n", "2", "--temperature", "1.0", "--seed", "3")
    _, out, _ = octavo("generate", *tiny, *OPTIONS, *arguments)
    first, second = expected_text(tiny[0], "abc", n=2, temperature=1.0, seed=3)
    assert out == f"### abc [0]\n{first}\n### abc [1]\n{second}\n"


def test_json_is_one_object_a_prompt(octavo, tiny):
    status, out, _ = octavo("generate", *tiny, *OPTIONS, "--raw", "--json", "abc", "xyz")
    first, second = map(json.loads, out.splitlines())
    assert status == 0
    assert (first["prompt"], second["prompt"]) == ("abc", "xyz")
    assert first["num_prompt_tokens"] == 3
    assert first["outputs"][0]["finish_reason"] == "length"
    assert len(first["outputs"][0]["token_ids"]) == 6
    assert first["error"] is None
    assert set(first["metrics"]) >= {"queue_s", "ttft_s", "tpot_s", "e2e_s"}


def test_a_dash_reads_standard_input(octavo, tiny, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    _, out, _ = octavo("generate", *tiny, *OPTIONS, "--raw", "-")
    assert out == expected_text(tiny[0], "abc")[0] + "\n"


def test_standard_input_can_be_read_once(octavo, tiny, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    status, out, err = octavo("generate", *tiny, "--raw", "-", "xyz", "-")
    assert (status, out) == (2, "")
    assert "- stands for all of standard input and may be given once, got 2" in err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text_is_named(octavo, tiny, monkeypatch, errors):
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert octavo("generate", *tiny, "-") == (
        1, "", "octavo: error: standard input is not UTF-8 text; convert it, for example with iconv\n"
    )  # fmt: skip


@pytest.mark.parametrize("prompts", [[""], ["-"], ["abc", ""]])
def test_an_empty_prompt_is_refused_with_and_without_a_template(octavo, tiny, monkeypatch, prompts):
    for form in ("--chat", "--raw"):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
        status, out, err = octavo("generate", *tiny, form, *prompts)
        assert (status, out) == (1, "")
        assert err == "octavo: error: prompt is empty; give at least one word\n"


def test_an_interrupt_ends_the_line(octavo, tiny, monkeypatch):
    step = LLM.stream

    def interrupted(self, *arguments):
        yield next(iter(step(self, *arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    status, out, err = octavo("generate", *tiny, *OPTIONS, "--raw", "abc")
    assert (status, err) == (130, "octavo: error: interrupted\n")
    assert out.endswith("\n")


@pytest.fixture
def failing_step(monkeypatch):
    def launch(self, plan):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("octavo.engine.runner.ModelRunner.launch", launch)


@pytest.mark.usefixtures("failing_step")
def test_a_failed_step_is_one_line(octavo, tiny):
    status, _, err = octavo("generate", *tiny, "--raw", "abc")
    assert (status, err) == (
        1, "octavo: error: the step failed: RuntimeError: no such instruction\n"
    )  # fmt: skip


@pytest.mark.usefixtures("failing_step")
def test_debug_shows_where_a_step_failed(octavo, tiny):
    status, _, err = octavo("generate", *tiny, "--raw", "abc", "--debug")
    assert status == 1
    assert "Traceback (most recent call last)" in err
    assert 'raise RuntimeError("no such instruction")' in err
    assert err.endswith("octavo: error: the step failed: RuntimeError: no such instruction\n")


def test_stats_go_to_standard_error(octavo, tiny):
    _, _, err = octavo("generate", *tiny, *OPTIONS, "--raw", "--stats", "abc")
    assert err.startswith("3 prompt tokens (0 cached), 6 generated, first token after ")


def test_the_trace_has_one_record_a_step(octavo, tiny, tmp_path):
    trace = tmp_path / "trace.jsonl"
    octavo("generate", *tiny, *OPTIONS, "--raw", "--trace", trace, "abc")
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(records) == 6


QUESTION = "'What is the capital of France?'"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], f"a model and a prompt are needed, for example: octavo generate smollm2-135m {QUESTION}"),
        ([""], f"a model and a prompt are needed, for example: octavo generate smollm2-135m {QUESTION}"),
        (
            ["some prompt"],
            "the model is missing: it stands before the prompt, and 'some prompt' is none; "
            "for example: octavo generate smollm2-135m 'some prompt'",
        ),
        (
            ["hello", "--max-tokens", "3"],
            "the model is missing: it stands before the prompt, and 'hello' is none; "
            "for example: octavo generate smollm2-135m hello",
        ),
        (
            ["What is 1/2?", "And 1/3?"],
            "the model is missing: it stands before the prompt, and 'What is 1/2?' is none; "
            "for example: octavo generate smollm2-135m 'What is 1/2?'",
        ),
        (
            ["why " * 100],
            f"the model is missing: it stands before the prompt, and {shown('why ' * 100)} is none; "
            "for example: octavo generate smollm2-135m '...'",
        ),
        (["smollm2-135m"], f"the prompt is missing, for example: octavo generate smollm2-135m {QUESTION}"),
        (["a/b c.gguf"], "the model is missing: it stands before the prompt, and 'a/b c.gguf' is none; "
         "for example: octavo generate smollm2-135m 'a/b c.gguf'"),
        (["some/folder"], f"the prompt is missing, for example: octavo generate some/folder {QUESTION}"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_with_an_example(octavo, arguments, line):
    expected = f"octavo: error: {line}; see `octavo generate --help`\n"
    assert octavo("generate", *arguments) == (2, "", expected)


def test_a_folder_with_a_space_in_its_name_is_a_model(octavo, tiny, tmp_path):
    folder = tmp_path / "my model"
    folder.symlink_to(tiny[0])
    status, out, err = octavo("generate", folder, *tiny[1:], *OPTIONS, "--raw", "abc")
    assert (status, err) == (0, "")
    assert out == expected_text(tiny[0], "abc")[0] + "\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
        (("--temperature", "nan"), "--temperature must be finite, got nan"),
        (("--top-p", "2"), "--top-p must be above 0 and at most 1, got 2"),
        (("-n", "0"), "-n must be at least 1, got 0"),
        (("--stop", ""), "--stop holds an empty string"),
        (("--seed", "99999999999999999999"), "--seed must be between"),
        (("--dtype", "float23"), "--dtype must be one of 'auto', 'float32'"),
        (("--kv-cache-memory", "banana"), "--kv-cache-memory must be a positive size such as '24GiB'"),
    ],
)
def test_a_value_that_no_model_takes_is_told_before_one_is_loaded(
    octavo, monkeypatch, command, options, message
):
    monkeypatch.setattr("octavo.llm.LLM.__init__", lambda *_, **__: pytest.fail("it was loaded"))
    prompts = ["abc"] if command == "generate" else []
    status, out, err = octavo(command, "some/model", *prompts, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"octavo: error: {message}")
    assert err.endswith(f"; see `octavo {command} --help`\n")


def test_min_tokens_are_held_against_the_models_own_max_tokens_only_by_the_engine(octavo, tiny):
    options = ("--raw", "--min-tokens", "300", "--ignore-eos", "abc")
    status, _, err = octavo("generate", *tiny, *options)
    assert status == 1, "the most tokens are those of the model, and are not known before"
    assert "min_tokens" in err


def test_bad_input_is_one_line(octavo, tiny, tmp_path):
    cases = [
        (("generate", tmp_path / "nothing", "abc"), "nothing"),
        (("generate", *tiny, "--raw", ""), "empty"),
        (("generate", *tiny, "--raw", "a" * 300), "256"),
        (("generate", tiny[0], "--load-format", "dummy", "--kv-cache-memory", "100", "abc"), "block"),
    ]
    for arguments, word in cases:
        status, out, err = octavo(*arguments)
        assert (status, out) == (1, ""), arguments
        assert err.startswith("octavo: error: ")
        assert err.count("\n") == 1
        assert word in err, err
        assert "fault in Octavo" not in err
