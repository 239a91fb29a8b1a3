import io
import os
import signal

import pytest
from rich.console import Console

from octavo import LLM, SamplingParams
from octavo.cli.chat import Conversation

OPTIONS = ("--max-tokens", "5", "--ignore-eos")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def chat(octavo, tiny, monkeypatch):
    def run(text, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return octavo("chat", *tiny, *OPTIONS, *arguments)

    return run


@pytest.fixture
def conversation(model_folder):
    with LLM(model_folder, load_format="dummy", num_threads=1, num_blocks=64) as llm:
        console = Console(file=io.StringIO(), highlight=False)
        yield Conversation(llm, SamplingParams(max_tokens=5, ignore_eos=True), "Be brief.", console)


def test_a_piped_conversation_is_answered_line_by_line(chat, conversation):
    status, out, err = chat("one\ntwo\n", "--system", "Be brief.")
    conversation.answer("one")
    conversation.answer("two")
    assert (status, err) == (0, "")
    assert out == conversation.console.file.getvalue()
    assert [message["role"] for message in conversation.messages] == [
        "system", "user", "assistant", "user", "assistant"
    ]  # fmt: skip


def test_reset_forgets_all_but_the_system_message(conversation):
    conversation.answer("one")
    conversation.command("/reset")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.last is None


def test_the_second_turn_finds_the_first_in_the_cache(conversation):
    conversation.answer("a question long enough to fill several blocks of the cache")
    conversation.answer("and another")
    assert conversation.last.num_cached_tokens >= 48


def test_stats_tell_the_last_answer_and_the_engine(chat):
    _, out, _ = chat("one\n/stats\n")
    assert "5 generated" in out
    assert "num_free_blocks: " in out


def test_help_exit_and_a_misspelt_command(chat):
    status, out, err = chat("/help\n/rest\n/exit\nnever read\n")
    assert "/reset" in out
    assert "/stats" in out
    assert out.count("\n") == 4
    assert (status, err) == (1, "octavo: error: no command /rest (did you mean '/reset'?)\n")


def test_a_refused_message_is_one_line_on_standard_error_and_a_failure_in_the_end(chat):
    too_long = "x" * 400
    status, out, err = chat(f"{too_long}\none\n{too_long}\n")
    assert status == 1
    assert out.count("\n") == 1  # the answer to the second line
    first, second = err.splitlines()
    assert first.startswith("octavo: error: ")
    assert "/reset" not in first  # there is nothing to forget yet
    assert second.endswith("; /reset forgets the conversation and makes room")


def test_input_that_is_no_text_is_named(octavo, tiny, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    status, out, err = octavo("chat", *tiny)
    assert (status, out) == (1, "")
    assert err == "octavo: error: standard input is not UTF-8 text; convert it, for example with iconv\n"


def test_a_question_that_is_too_long_does_not_end_the_chat(conversation):
    conversation.answer("x" * 400)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    conversation.answer("short")
    assert conversation.last.finish_reason == "length"


def test_an_interrupt_stops_the_answer_and_not_the_program(conversation, monkeypatch):
    pieces = []
    show = conversation._print_piece

    def interrupt_at_the_second(piece):
        show(piece)
        pieces.append(piece)
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(conversation, "_print_piece", interrupt_at_the_second)
    before = signal.getsignal(signal.SIGINT)
    conversation.params = SamplingParams(max_tokens=50, ignore_eos=True)
    conversation.answer("one")
    assert conversation.console.file.getvalue().endswith(" (stopped)\n")
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert signal.getsignal(signal.SIGINT) is before
    stats = conversation.llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_owned_blocks) == (0, 0, 0)


def test_a_model_without_a_template_is_sent_to_generate(octavo, model_folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    status, _, err = octavo("chat", tmp_path, "--load-format", "dummy", "--num-blocks", "64")
    assert status == 1
    assert "has no chat template; use `octavo generate" in err


def test_a_failed_answer_is_told_and_forgotten(conversation, monkeypatch, capsys):
    conversation.answer("one")
    before = list(conversation.messages)

    def broken(plan):
        raise RuntimeError("no such instruction")

    with monkeypatch.context() as patch:
        patch.setattr(conversation.llm.engine.runner, "launch", broken)
        conversation.answer("two")
    assert capsys.readouterr().err == ("octavo: error: the step failed: RuntimeError: no such instruction\n")
    assert conversation.failed
    assert conversation.messages == before
    conversation.answer("three")
    assert [message["content"] for message in conversation.messages[1::2]] == ["one", "three"]


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_leaves_no_escape_codes(octavo, tiny, tmp_path, monkeypatch, no_color, coloured):
    prompts = []

    def read(prompt=""):
        prompts.append(prompt)
        return "/help" if len(prompts) == 1 else "/exit"

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", Terminal())
    status, out, _ = octavo("chat", *tiny)
    assert status == 0
    assert ("\033" in out, "\033" in "".join(prompts)) == (coloured, coloured)


def test_the_greeting_shows_the_model_as_it_is_written(octavo, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", Terminal("/exit\n"))
    folder = tmp_path / "tiny[bold]"
    folder.symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    _, out, _ = octavo(
        "chat", folder.name, "--load-format", "dummy", "--num-threads", "1", "--num-blocks", "64"
    )
    assert out.startswith("tiny[bold] – /help lists the commands")


def test_more_answers_than_one_are_refused(chat):
    status, _, err = chat("one\n", "-n", "2", "--temperature", "1")
    assert status == 1
    assert "n=2" in err
