from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.text.stop import StopChecker


def feed(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stops, include)
    shown = ""
    for piece in pieces:
        text, matched = checker.push(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + checker.finish(), None


@pytest.mark.parametrize("pieces", [["Hi", "\n", "Q", ": x"], ["Hi\nQ: x"], list("Hi\nQ: x")])
def test_a_stop_over_several_chunks_is_never_partly_shown(pieces: list[str]) -> None:
    # text-generation-inference#1254
    assert feed(pieces, ["\nQ:"]) == ("Hi", "\nQ:")


def test_each_push_shows_what_is_safe() -> None:
    checker = StopChecker(["\nQ:"])
    assert [checker.push(piece) for piece in ["Hi", "\n", "Q", ": x"]] == [
        ("Hi", None),
        ("", None),
        ("", None),
        ("", "\nQ:"),
    ]
    assert checker.push("more") == ("", "\nQ:")
    assert checker.finish() == ""


def test_a_beginning_that_leads_nowhere_is_released() -> None:
    checker = StopChecker(["END"])
    assert checker.push("EN") == ("", None)
    assert checker.push("TRY") == ("ENTRY", None)
    assert checker.finish() == ""


def test_the_end_releases_what_was_held() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", None)
    assert checker.finish() == "EN"
    assert checker.finish() == ""


@pytest.mark.parametrize(
    ("stops", "text", "include", "expected"),
    [
        (["END", "ENDING"], "the ENDING", False, ("the ", "END")),  # one begins the other: complete first
        (["END", "ENDING"], "the ENDING", True, ("the END", "END")),
        (["D", "END"], "the END.", False, ("the ", "END")),  # complete at the same character: the longest
        (["END", "D"], "the END.", True, ("the END", "END")),
        (["b", "a"], "xaxb", False, ("x", "a")),
        (["aab"], "aaab", False, ("a", "aab")),  # a failed beginning holds the next one
        (["abab"], "abaabab", False, ("aba", "abab")),
        (["aaaa", "aab"], "aaab", False, ("a", "aab")),
        (["é"], "café!", True, ("café", "é")),
        ([], "anything", False, ("anything", None)),
        (["zz"], "", False, ("", None)),
    ],
)
def test_which_stop_wins_does_not_depend_on_the_pieces(
    stops: list[str], text: str, include: bool, expected: tuple[str, str | None]
) -> None:
    assert feed([text], stops, include) == expected
    assert feed(list(text), stops, include) == expected
    assert feed([text[:2], text[2:]], stops, include) == expected


def by_hand(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by one character until it ends in a stop."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(deadline=None)  # other work shares the machine
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_any_pieces_give_the_answer_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert feed(pieces, stops, include) == by_hand("".join(pieces), stops, include)


@pytest.mark.parametrize("stop", ["", None, 5])
def test_a_stop_must_be_a_non_empty_string(stop: object) -> None:
    with pytest.raises(RequestError, match=r"stop\[1\]: expected a non-empty string, got"):
        StopChecker(["fine", stop])  # type: ignore[list-item]  # the point of the test
