"""The page in a real browser, for whoever has a small screen, no pointer, or no eyes on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.browser import page_of, running_browser
from helpers.observed import Observed
from helpers.page import Feed, page_server
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


def test_on_a_phone_one_part_at_a_time_and_nothing_sticks_out(browser: Browser) -> None:
    engine = Observed(num_blocks=200)
    phone = {
        "viewport": {"width": 360, "height": 740},
        "device_scale_factor": 3,
        "has_touch": True,
        "is_mobile": True,
    }
    feed = Feed(engine)
    with page_server(payload=feed.payload) as server, page_of(browser, server.url, **phone) as page:
        assert page.is_visible("#chat")
        assert page.is_hidden("#engine")
        page.tap("#tab-engine")
        assert page.is_hidden("#chat")
        server.call(lambda: engine.add([1] * 9, max_tokens=50))
        server.call(engine.step)
        feed.seen(page)
        page.tap("#map", position={"x": 4, "y": 4})
        assert page.inner_text("#map-tip").startswith("Block 0: in use")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        sizes = page.evaluate("[...document.querySelectorAll('#engine > *')].map((box) => box.scrollWidth)")
        assert max(sizes) <= 360


def test_with_the_keyboard_alone_and_for_a_screen_reader(browser: Browser) -> None:
    with page_server() as server, page_of(browser, server.url, reduced_motion="reduce") as page:
        order = []
        for _ in range(14):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        reached = ["new-chat", "open-settings", "theme", "messages-scroller", "prompt", "send", "map", "rows"]
        assert [name for name in order if name in reached] == reached
        assert page.evaluate(NAMELESS) == []
        page.focus("#open-settings")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.closest('dialog').id") == "settings"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "open-settings"
        for _ in range(2):  # automatic is light here; then light, then dark
            assert page.evaluate(FAINT) == []
            page.click("#theme")
        assert page.get_attribute("html", "data-theme") == "dark"
        assert page.evaluate(FAINT) == []


NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, canvas, [role=grid], [tabindex]")]
    .filter((box) => {
        if (box.ariaHidden === "true") return false;
        const label = box.labels?.[0]?.textContent || box.getAttribute("aria-label") || box.textContent;
        return !(label.trim() || document.getElementById(box.getAttribute("aria-labelledby")));
    })
    .map((box) => box.outerHTML.slice(0, 80))"""
"""Controls without a name."""

FAINT = """() => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = (rgb) => {
        const [R, G, B] = rgb.map((value) => linear(value / 255));
        return 0.2126 * R + 0.7152 * G + 0.0722 * B;
    };
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const ground = (box) => {
        for (; box; box = box.parentElement) {
            const colour = rgb(getComputedStyle(box).backgroundColor);
            if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const faint = [];
    for (const box of document.querySelectorAll("body *")) {
        const text = [...box.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!text || !box.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
        const [a, b] = [light(rgb(getComputedStyle(box).color)), light(ground(box))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(box.outerHTML.slice(0, 80));
    }
    return faint;
}"""
"""Visible text whose contrast is below 4.5 (WCAG AA)."""
