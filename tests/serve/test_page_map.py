"""The page in a real browser: the map of the KV cache, the requests, and how fast both are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.browser import page_of, running_browser
from helpers.observed import Observed, busy_engine
from helpers.page import Feed, next_payload, page_server
from helpers.serve import running_server, wait_until
from playwright.sync_api import Browser, Page

SUMMARY = """async () => {
    const { engine } = await import("/page/main.js");
    return {
        owners: [...engine.owners],
        rows: [...engine.rows.values()].map((row) => [
            row.id, row.requestId, row.index, row.numPrompt, row.numTokens, row.numComputed, row.numCached,
            row.isRunning, row.blocks,
        ]),
        lost: [...engine.owners].flatMap((count, block) => {
            const row = engine.rows.get(engine.holder[block]);
            const isRight = count > 0 ? row?.blocks[engine.position[block]] === block : !row;
            return isRight ? [] : [block];
        }),
    };
}"""
"""What the page holds; `lost`: blocks whose known holder does not hold them, or is missing."""

COLOUR = """async (block) => {
    const { map } = await import("/page/main.js");
    const canvas = document.getElementById("map");
    const { x, y, width } = map.placeOf(block);
    const scale = devicePixelRatio;
    const at = (share) => [...canvas.getContext("2d").getImageData(
        (x + width * share) * scale, (y + width * share) * scale, 1, 1).data.slice(0, 3)];
    return { edge: at(0.15), middle: at(0.42) };
}"""
"""The colours of a block's cell near its edge and in its middle."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def number(page: Page, selector: str) -> int:
    return int(page.inner_text(selector).replace(",", "") or 0)


def truth_of(engine: Observed) -> dict[str, Any]:
    rows = []
    scheduler = engine.scheduler
    for seq in [*scheduler.running, *scheduler.waiting]:
        is_running = seq in scheduler.running
        rows.append(
            [
                seq.seq_id,
                seq.request.request_id,
                seq.index,
                seq.num_prompt_tokens,
                len(seq.token_ids),
                seq.num_computed_tokens,
                seq.request.num_cached_tokens,
                is_running,
                engine.cache.block_table(seq.seq_id) if is_running else [],
            ]
        )
    owners = engine.cache.num_owners_of(range(engine.num_blocks))
    return {"owners": owners, "rows": sorted(rows), "lost": []}


def test_what_the_page_holds_is_what_the_engine_holds(browser: Browser) -> None:
    chance = random.Random(7)
    engine = Observed(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=24)
    feed = Feed(engine)
    with page_server(payload=feed.payload, period_s=0.01) as server, page_of(browser, server.url) as page:
        for _ in range(25):
            for _ in range(8):
                server.call(lambda: act(engine, chance))
            feed.seen(page)
            found = page.evaluate(SUMMARY)
            found["rows"].sort()
            assert found == truth_of(engine)
        assert engine.scheduler.num_preemptions > 0
        assert engine.cache.num_evictions > 0


def act(engine: Observed, chance: random.Random) -> None:
    if chance.random() < 0.4:
        prompt = [chance.choice((1, 2))] * chance.choice((3, 8, 21)) + [chance.randrange(50)]
        engine.add(prompt, chance.randrange(1, 24), n=chance.choice((1, 1, 3)))
    if chance.random() < 0.05 and engine.scheduler.running:
        engine.abort(chance.choice(engine.scheduler.running).request)
    engine.step()


def test_states_are_told_apart_by_colour_and_shape_and_blocks_tell_their_owners(browser: Browser) -> None:
    engine = Observed(num_blocks=64, block_size=4)
    feed = Feed(engine)
    with (
        page_server(payload=feed.payload, period_s=0.02) as server,
        page_of(browser, server.url, expected=("getImageData",)) as page,
    ):
        engine_calls = [
            lambda: engine.add([1] * 9, max_tokens=50),  # blocks 0, 1, 2
            engine.step,
            lambda: engine.add([1] * 9, max_tokens=50),  # shares 0 and 1
            engine.step,
            lambda: engine.add([2] * 5, max_tokens=1),  # leaves a cached block behind
            engine.step,
        ]
        for call in engine_calls:
            server.call(call)
        feed.seen(page)
        free, cached, own, shared = (page.evaluate(COLOUR, block) for block in (60, 4, 2, 0))
        paper = free["edge"]
        assert cached["edge"] == paper != cached["middle"]  # a small square
        assert free["middle"] not in (paper, cached["middle"])  # a dot
        assert own["edge"] not in (paper, cached["middle"], shared["edge"])  # a full square
        assert shared["middle"] == paper != shared["edge"]  # a square with a hole
        assert [page.inner_text(f"#num-{name}") for name in ("free", "cached", "owned", "shared")] == [
            "59",
            "1",
            "2",
            "2",
        ]
        place = page.evaluate("async () => (await import('/page/main.js')).map.placeOf(0)")
        page.hover("#map", position={"x": place["x"] + 3, "y": place["y"] + 3})
        assert page.locator("#map-tip > *").all_inner_texts() == [
            "Block 0: shared by 2",
            "r0: tokens 0–3 (decode)",
            "r1: tokens 0–3 (decode)",
        ]
        page.focus("#map")
        page.keyboard.press("End")
        assert page.inner_text("#map-tip") == "Block 63: free"
        page.keyboard.press("Home")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert "r1: tokens 8–11" in page.inner_text("#map-tip")
        page.keyboard.press("Enter")  # chooses r1: the blocks of r0 alone fade
        page.wait_for_selector('.line[aria-selected="true"] >> text=r1')
        feed.seen(page)
        assert page.evaluate(COLOUR, 2) != own
        assert page.evaluate(COLOUR, 0) == shared
        page.keyboard.press("Escape")
        feed.seen(page)
        assert page.locator('.line[aria-selected="true"]').count() == 0
        assert page.evaluate(COLOUR, 2) == own
        page.locator(".line >> text=r0").click()
        page.focus("#rows")
        page.keyboard.press("ArrowDown")
        page.wait_for_selector('.line[aria-selected="true"] >> text=r1')


def test_evictions_and_preemptions_flash(browser: Browser) -> None:
    engine = Observed(num_blocks=4, block_size=4, max_num_batched_tokens=16, watermark_blocks=0)
    feed = Feed(engine)
    with (
        page_server(payload=feed.payload, period_s=0.02) as server,
        page_of(browser, server.url, expected=("getImageData",)) as page,
    ):
        server.call(lambda: engine.add([1] * 8, max_tokens=1))
        server.call(engine.drain)
        feed.seen(page)
        before = page.evaluate(COLOUR, 0)
        page.evaluate(  # flashes as if time stood still at their beginning
            "async () => { const { map } = await import('/page/main.js'); map.flashMs = 1e9; }"
        )
        for prompt in ([2] * 7, [3] * 7):
            server.call(lambda prompt=prompt: engine.add(prompt, max_tokens=8))
        while engine.scheduler.num_preemptions == 0:
            server.call(engine.step)
            feed.seen(page)
        colours = page.evaluate(
            """() => {
                const style = getComputedStyle(document.documentElement);
                const read = (name) => style.getPropertyValue(name);
                return [read("--map-evicted"), read("--map-preempted")];
            }"""
        )
        wanted = [[int(text.strip()[i : i + 2], 16) for i in (1, 3, 5)] for text in colours]
        now = [page.evaluate(COLOUR, block)["edge"] for block in range(4)]
        assert before["edge"] not in wanted
        assert wanted[0] in now or engine.cache.num_evictions == 0
        assert wanted[1] in now
        assert page.inner_text("#num-preempted") == "1"
        assert int(page.inner_text("#num-evicted")) == engine.cache.num_evictions > 0


def test_a_thousand_requests_and_fifty_thousand_blocks_are_smooth(browser: Browser) -> None:
    """Frames of 60 a second leave 16 ms, of which this takes a quarter or so on a machine of its own.

    A page that touched every block or row at each payload would take hundreds; medians, and room for a
    machine that is busy with other things.
    """
    engine = busy_engine()
    for _ in range(400):  # to where blocks run out
        engine.step()

    def payload(is_full: bool) -> bytes:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 1000:
            engine.add([len(engine.requests) % 5] * 336 + [7, len(engine.requests) % 50] * 182, 500)
        engine.step()
        return next_payload(engine.observer, is_full)

    with page_server(payload=payload) as server, page_of(browser, server.url) as page:
        wait_until(lambda: len(page.inner_text("#running")) > 2)
        times = page.evaluate(
            """async () => {
                const { engine, map, table } = await import("/page/main.js");
                const middle = (times) => times.toSorted((a, b) => a - b)[Math.floor(times.length / 2)];
                const timed = (object, name, times) => {
                    const inner = object[name].bind(object);
                    object[name] = (...all) => {
                        const began = performance.now();
                        const result = inner(...all);
                        times.push(performance.now() - began);
                        return result;
                    };
                };
                const applied = [], listed = [];
                timed(engine, "apply", applied);
                timed(table, "update", listed);
                map.frameMs.length = 0;
                const end = performance.now() + 3000;
                while (performance.now() < end) await new Promise(requestAnimationFrame);
                const drawn = [...map.frameMs];
                const began = performance.now();
                const numDrawn = map.frameMs.length;
                map.refresh();
                while (map.frameMs.length === numDrawn) await new Promise(requestAnimationFrame);
                return {
                    numPayloads: applied.length, apply: middle(applied), list: middle(listed),
                    draw: middle(drawn), all: map.frameMs.at(-1),
                    shown: map.numShown, rows: engine.rows.size,
                };
            }"""
        )
    assert times["shown"] == 50_000
    assert times["rows"] > 900
    assert times["numPayloads"] >= 1
    assert times["apply"] + times["list"] + times["draw"] < 100, times
    assert times["all"] < 1000, times  # all cells anew: another size, another theme
    assert engine.cache.num_evictions + engine.scheduler.num_preemptions > 0


def test_a_lost_payload_has_the_page_begin_anew(browser: Browser) -> None:
    engine = Observed(num_blocks=64, block_size=4)
    feed = Feed(engine)
    with page_server(payload=feed.payload, period_s=0.02) as server, page_of(browser, server.url) as page:
        server.call(lambda: engine.add([1] * 9, max_tokens=50))
        server.call(engine.step)
        feed.seen(page)

        def lose_one() -> None:
            for _ in range(5):  # the table grows by a block
                engine.step()
            engine.observer.payload()

        server.call(lose_one)
        feed.seen(page)
        wait_until(lambda: page.evaluate(SUMMARY) == truth_of(engine))
        assert len(engine.cache.block_table(0)) == 4


def test_the_charts_of_another_engine_begin_anew(browser: Browser) -> None:
    last_step = "async () => (await import('/page/main.js')).timeline.last"
    expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "ERR_CONNECTION_RESET")
    engine, other = (Observed(num_blocks=64, block_size=4) for _ in range(2))
    feed, other_feed = Feed(engine), Feed(other)
    with (
        page_server(payload=feed.payload, period_s=0.02) as server,
        page_of(browser, server.url, expected=expected) as page,
    ):
        server.call(lambda: engine.add([1] * 9, max_tokens=50))
        server.call(engine.step)
        feed.seen(page)
        wait_until(lambda: page.evaluate(last_step) is not None)
        server.stop()
        page.wait_for_selector('#state[data-state="lost"]')
        with page_server(payload=other_feed.payload, period_s=0.02, port=server.port):
            page.wait_for_selector('#state[data-state="ready"]')
            wait_until(lambda: page.evaluate(last_step) is None)


def test_a_page_that_nobody_sees_does_not_watch(browser: Browser) -> None:
    hide = """(isHidden) => {
        Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange", { bubbles: true }));
    }"""
    with page_server() as server, page_of(browser, server.url) as page:
        wait_until(lambda: server.link.watching)
        page.evaluate(hide, True)
        wait_until(lambda: not server.link.watching)
        page.evaluate(hide, False)
        wait_until(lambda: server.link.watching)


def test_a_large_cache_shows_its_front_until_it_is_used(browser: Browser) -> None:
    engine = Observed(num_blocks=5000, block_size=1)
    feed = Feed(engine)
    shown = "async () => (await import('/page/main.js')).map.numShown"
    with page_server(payload=feed.payload, period_s=0.02) as server, page_of(browser, server.url) as page:
        feed.seen(page)
        assert page.evaluate(shown) == 512
        server.call(lambda: engine.add([1] * 600, max_tokens=1))
        server.call(engine.step)
        feed.seen(page)
        assert page.evaluate(shown) == 1024
        page.click("#show-all")
        feed.seen(page)
        assert page.evaluate(shown) == 5000
        page.click("#show-all")
        feed.seen(page)
        assert page.evaluate(shown) == 1024


@pytest.mark.model
def test_a_real_model_answers_and_its_blocks_come_and_go(browser: Browser) -> None:
    with (
        running_server("smollm2-135m", "--num-blocks", 256, "--num-threads", 1) as server,
        page_of(browser, server.url) as page,
    ):
        page.fill("#prompt", "Tell me a long story about a lighthouse.")
        page.keyboard.press("Enter")
        wait_until(lambda: number(page, "#num-owned") >= 4)
        assert page.locator(".line").first.is_visible()
        first = number(page, ".line .blocks")
        page.locator("button[data-action=row]").click()
        page.wait_for_selector('.line[aria-selected="true"]')
        wait_until(lambda: number(page, ".line .blocks") > first)
        page.click("#stop")
        wait_until(lambda: number(page, "#num-owned") == 0)
        assert number(page, "#num-cached") >= 4  # what was computed can be found again
        page.click("button[data-action=again]")
        wait_until(lambda: number(page, "#num-owned") >= 3)
        page.click("#stop")
        page.wait_for_selector("#send:not([hidden])")
        status = json.loads(page.evaluate("fetch('/v1/engine/state').then((answer) => answer.text())"))
        assert status["stats"]["num_hit_tokens"] >= 32
        assert status["blocks"]["owners"] == {}
