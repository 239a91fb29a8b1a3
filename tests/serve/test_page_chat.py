"""The page in a real browser: asking, reading, stopping, settings, keys, and a server that comes and goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.browser import page_of, running_browser
from helpers.page import page_server
from helpers.serve import Answer, wait_until
from playwright.sync_api import Browser, Page

from octavo.errors import EngineError
from octavo.serve.settings import ServeSettings


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def until_answered(page: Page) -> None:
    page.wait_for_selector("#send:not([hidden])")


def last_answer(page: Page) -> str:
    return page.locator(".message.assistant .text").last.inner_text()


def test_an_answer_grows_is_laid_out_and_timed(browser: Browser) -> None:
    gate = asyncio.Event()
    pieces = ["Some **bold", "** words\n\n", "- one\n", "- two"]
    answer = Answer(pieces, num_cached_tokens=4, gate=gate, gate_from=3)
    with page_server(answer) as server, page_of(browser, server.url) as page:
        assert page.title() == "Octavo"
        assert page.inner_text("#model-name") == "scripted"
        ask(page, "Hello?")
        page.wait_for_selector(".text strong >> text=bold")
        assert page.locator(".caret").count() == 1
        page.wait_for_selector(".text li >> text=one")
        page.evaluate("document.querySelector('.text p').mark = 'left alone'")
        assert page.is_visible("#stop")
        assert page.locator(".message.user .body").inner_text() == "Hello?"
        server.call(gate.set)
        until_answered(page)
        assert page.locator(".text li").all_inner_texts() == ["one", "two"]
        assert page.locator(".caret").count() == 0
        # What is finished is left alone, so that it can be selected while the rest grows.
        assert page.evaluate("document.querySelector('.text p').mark") == "left alone"
        facts = page.locator(".message.assistant .fact").all_inner_texts()
        prompt_tokens = len(server.link.submitted[0].prompt_token_ids)
        assert facts[-2:] == [f"{len(''.join(pieces))} tokens", f"4 of {prompt_tokens} cached"]
        assert facts[0].endswith(("ms", " s"))
        assert "two" in page.inner_text("#announcer")  # for a screen reader, once it is whole
        assert page.evaluate("document.activeElement.id") == "prompt"


def test_thoughts_stand_apart_and_are_not_sent_back(browser: Browser) -> None:
    settings = ServeSettings(reasoning_parser="think")
    answer = Answer(["<think>\nhm, **so**", "</think>\n\n", "It is *six*."])
    with page_server(answer, settings) as server, page_of(browser, server.url) as page:
        ask(page, "How many?")
        until_answered(page)
        assert last_answer(page) == "It is six."
        assert page.is_hidden(".reasoning div")
        page.click(".reasoning summary")
        assert page.inner_text(".reasoning div").strip() == "hm, **so**"
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Sure?")
        messages = json.loads(sent.value.post_data or "")["messages"]
        assert messages[1] == {"role": "assistant", "content": "It is *six*."}
        until_answered(page)


@pytest.mark.parametrize("by_key", [True, False], ids=["key", "button"])
def test_stopping_aborts_and_keeps_what_came(browser: Browser, by_key: bool) -> None:
    answer = Answer(["Once ", "upon ", "never"], gate=asyncio.Event(), gate_from=2)
    with page_server(answer) as server, page_of(browser, server.url) as page:
        ask(page, "A story")
        page.wait_for_selector(".text >> text=upon")
        if by_key:
            page.keyboard.press("Escape")
        else:
            page.click("#stop")
        until_answered(page)
        wait_until(lambda: server.call(lambda: len(server.link.aborted)) == 1)
        assert last_answer(page) == "Once upon"
        assert page.locator(".fact").last.inner_text() == "stopped"


def test_what_a_model_writes_cannot_act(browser: Browser) -> None:
    evil = (
        'Hi <img src="http://192.0.2.1/x.png" onerror="window.hit=1"> <script>window.hit=1</script>'
        "\n\n![a](http://192.0.2.1/y.png) [bad](javascript:window.hit=1) [good](https://example.org/)"
        '\n\n<iframe src="http://192.0.2.1/"></iframe><p style="position:fixed" onclick="window.hit=1">p</p>'
        '<form action="http://192.0.2.1/"><input name="a" type="text"><button>b</button></form>'
    )
    with page_server(Answer([evil])) as server, page_of(browser, server.url) as page:
        ask(page, "<b>not bold</b>")
        until_answered(page)
        assert page.locator(".message.user .body").inner_text() == "<b>not bold</b>"
        assert page.locator(".text :is(img, script, iframe, form, button, [style], [onclick])").count() == 0
        assert page.locator(".text input").count() == 0
        links = page.eval_on_selector_all(".text a[href]", "all => all.map(a => [a.href, a.rel])")
        assert links == [["https://example.org/", "noopener noreferrer nofollow"]]
        assert page.evaluate("window.hit") is None
        assert "<script>window.hit=1</script>" in last_answer(page)  # told, not run
        # Were Markdown ever to let HTML through, it would still be made harmless.
        assert (
            page.evaluate(
                """async () => {
                const { default: purify } = await import("/page/purify.mjs");
                return purify.sanitize('<b onclick="x()">b</b><script>x()</script>');
            }"""
            )
            == "<b>b</b>"
        )


def test_settings_reach_the_engine_and_stay(browser: Browser) -> None:
    with page_server(Answer(["yes"])) as server, page_of(browser, server.url) as page:
        page.click("#open-settings")
        page.fill("[name=system]", "Be brief.")
        page.fill("[name=temperature]", "0.25")
        page.fill("[name=top_p]", "0.9")
        page.fill("[name=max_tokens]", "7")
        page.fill("[name=choices]", "yes\n no \n\n")
        page.keyboard.press("Tab")
        page.click("#settings button.primary")
        page.reload()
        page.wait_for_selector('#state[data-state="ready"]')
        assert "temperature 0.25" in page.inner_text("#settings-note")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Well?")
        until_answered(page)
        body = json.loads(sent.value.post_data or "")
        assert body == {
            "model": "scripted",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}],
            "temperature": 0.25,
            "top_p": 0.9,
            "max_tokens": 7,
            "structured_outputs": {"choice": ["yes", "no"]},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        params = server.link.submitted[0].params
        assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.9, 7)
        page.click("#open-settings")
        assert page.input_value("[name=choices]") == "yes\n no"
        page.click("#reset-settings")
        page.click("#settings button.primary")
        page.wait_for_selector("#settings-note:empty", state="attached")


def test_a_conversation_goes_on_is_edited_and_outlives_a_reload(browser: Browser) -> None:
    answers = iter(["first", "second", "third", "fourth", "fifth"])
    with page_server(lambda submit: Answer([next(answers)])) as server, page_of(browser, server.url) as page:
        ask(page, "one")
        until_answered(page)
        ask(page, "two")
        until_answered(page)
        page.reload()
        assert page.locator(".message .body").all_inner_texts() == ["one", "first", "two", "second"]
        page.locator("button[data-action=again]").click()
        until_answered(page)
        assert page.locator(".message .body").all_inner_texts() == ["one", "first", "two", "third"]
        page.locator(".message.user").first.hover()
        page.locator("button[data-action=edit]").first.click()
        assert page.input_value("#prompt") == "one"
        ask(page, "other")
        until_answered(page)
        assert page.locator(".message .body").all_inner_texts() == ["other", "fourth"]
        prompts = [bytes(submit.prompt_token_ids) for submit in server.link.submitted]
        assert [len(prompt) for prompt in prompts[1:3]] == [
            len(prompts[1])
        ] * 2  # regenerated: the same again
        # A page that was closed before its answer came can ask again.
        page.evaluate("localStorage['octavo.chat'] = JSON.stringify([{role: 'user', content: 'lost'}])")
        page.reload()
        page.wait_for_selector('#state[data-state="ready"]')
        page.locator("button[data-action=again]").click()
        until_answered(page)
        assert page.locator(".message .body").all_inner_texts() == ["lost", "fifth"]
        page.click("#new-chat")
        assert page.is_visible("#welcome")
        page.reload()
        assert page.locator(".message").count() == 0


def test_refusals_are_told_and_can_be_tried_again(browser: Browser) -> None:
    answers = iter([Answer(refuse=("RequestError", "prompt has 9 tokens too many")), Answer(["better"])])
    with (
        page_server(lambda submit: next(answers)) as server,
        page_of(browser, server.url, expected=("400 (Bad Request)",)) as page,
    ):
        ask(page, "Hm")
        page.wait_for_selector(".error >> text=prompt has 9 tokens too many")
        page.click("button[data-action=again]")
        page.wait_for_selector(".text >> text=better")
        assert page.locator(".error").count() == 0


def test_an_engine_that_fails_in_the_middle_is_told(browser: Browser) -> None:
    answer = Answer(["so ", "far"], finish_reason="error", error="the step failed")
    with page_server(answer) as server, page_of(browser, server.url) as page:
        ask(page, "Hm")
        page.wait_for_selector(".error >> text=the step failed")
        assert last_answer(page).startswith("so")


def test_a_key_is_asked_for_once_and_kept_for_the_tab(browser: Browser) -> None:
    settings = ServeSettings(api_keys=("sesame",))
    with (
        page_server(Answer(["in"]), settings) as server,
        page_of(browser, server.url, until=None, expected=("401 (Unauthorized)",)) as page,
    ):
        page.wait_for_selector("#key[open]")
        page.keyboard.press("Escape")  # nobody is asked again and again
        page.wait_for_selector('#state[data-state="locked"]')
        page.click("#notice")
        page.fill("#key input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-about >> text=does not know that key")
        page.fill("#key input", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector('#state[data-state="ready"]')
        ask(page, "Hello")
        until_answered(page)
        assert last_answer(page) == "in"
        page.reload()
        page.wait_for_selector('#state[data-state="ready"]')
        assert page.evaluate("JSON.stringify(localStorage)").count("sesame") == 0
        assert page.is_hidden("#key")


def test_the_page_says_how_the_server_is(browser: Browser) -> None:
    with page_server() as server, page_of(browser, server.url) as page:
        states: list[Any] = [
            ("stuck", lambda: server.engine._set_state("stuck"), "no step ends"),
            ("ready", lambda: server.engine._set_state("ready"), None),
            ("dead", lambda: server.engine.lost("killed"), "killed"),
        ]
        for state, make_it_so, notice in states:
            server.call(make_it_so)
            page.wait_for_selector(f'#state[data-state="{state}"]')
            if notice is None:
                assert page.is_hidden("#notice")
            else:
                assert notice in page.inner_text("#notice")
    assert isinstance(server.engine.death, EngineError)


def test_a_server_that_comes_back_is_found_again(browser: Browser) -> None:
    answer = Answer(["It was ", "never said"], gate=asyncio.Event(), gate_from=1)
    with (
        page_server(answer) as server,
        page_of(
            browser, server.url, expected=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "ERR_CONNECTION_RESET")
        ) as page,
    ):
        ask(page, "What was it?")
        page.wait_for_selector(".text >> text=It was")
        server.stop()
        page.wait_for_selector('#state[data-state="lost"]')
        page.wait_for_selector(".message.assistant .error")
        assert last_answer(page) == "It was"
        assert "Trying again" in page.inner_text("#notice")
        with page_server(Answer(["again"]), port=server.port):
            page.wait_for_selector('#state[data-state="ready"]')
            page.click("button[data-action=again]")
            until_answered(page)
            assert last_answer(page) == "again"
