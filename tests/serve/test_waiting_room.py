"""What waits before the engine: two limits, and a guess of when there is room."""

import pytest

from octavo.errors import OverloadedError
from octavo.serve.settings import ServeSettings
from octavo.serve.waiting_room import WaitingRoom


def room(max_requests=3, max_tokens=10):
    return WaitingRoom(ServeSettings(max_waiting_requests=max_requests, max_waiting_tokens=max_tokens))


def test_it_is_full_by_count_and_has_room_again_when_one_leaves():
    one = room(max_tokens=1000)
    for i in range(3):
        one.check(1, 1)
        one.enter(str(i), 1)
    assert one.num_requests == 3
    message = (
        r"the server is busy: 3 requests are waiting, of at most 3 \(max_waiting_requests\); try again in 1 s"
    )
    with pytest.raises(OverloadedError, match=message):
        one.check(1, 1)
    one.leave("1", 1)
    one.check(1, 1)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        one.check(2, 1)


def test_those_that_free_rows_are_left_for_do_not_count():
    one = room(max_tokens=1000)
    one.check(5, 1, num_free_rows=2)
    with pytest.raises(
        OverloadedError, match=r"0 requests are waiting, of at most 3 .*, and 2 more can run now; 6 came at"
    ):
        one.check(6, 1, num_free_rows=2)
    for i in range(5):
        one.check(1, 1, num_free_rows=2)
        one.enter(str(i), 1)
    with pytest.raises(
        OverloadedError, match=r"busy: 3 requests are waiting, of at most 3 \([^,]*; try again"
    ):
        one.check(1, 1, num_free_rows=2)
    with one.text(1), pytest.raises(OverloadedError):
        one.check(1, 1, num_free_rows=3)


def test_a_request_goes_on_when_all_its_rows_are_free():
    one = room(max_requests=2, max_tokens=1000)
    one.check(3, 1, num_free_rows=4, num_rows=4)
    with pytest.raises(OverloadedError, match=r"0 requests are waiting, .*, and 1 more can run now; 4 came"):
        one.check(4, 1, num_free_rows=4, num_rows=4)
    for i in range(3):
        one.check(1, 1, num_free_rows=4, num_rows=4)
        one.enter(str(i), 1, num_rows=4)
    with pytest.raises(
        OverloadedError, match=r"busy: 2 requests are waiting, of at most 2 \([^,]*; try again"
    ):
        one.check(1, 1, num_free_rows=4, num_rows=4)
    one.leave("0", 1)
    one.enter("small", 1, num_rows=3)
    # One of the wide ones runs now; 3 rows are free, for the small one behind the other.
    one.leave("1", 1)
    one.check(1, 1, num_free_rows=3)
    with pytest.raises(OverloadedError, match=r"1 requests are waiting, of at most 2 \([^,]*; try again"):
        one.check(2, 1, num_free_rows=3)
    with one.text(1), pytest.raises(OverloadedError, match=r"0 .*, and 1 more can run now; 4 came at once"):
        one.check(4, 1, num_free_rows=9)


def test_rows_that_were_waited_for_are_free_again():
    one = room(max_requests=1, max_tokens=1000)
    one.enter("a", 1, num_rows=2)
    one.leave("a", 1)
    one.check(3, 1, num_free_rows=2)
    with pytest.raises(OverloadedError, match="and 2 more can run now; 4 came at once"):
        one.check(4, 1, num_free_rows=2)


def test_it_is_full_by_tokens_unless_it_is_empty():
    one = room()
    one.check(1, 1000)
    one.enter("a", 6)
    one.check(1, 4)
    message = r"6 prompt tokens are waiting and 5 more came; at most 10 may wait \(max_waiting_tokens\)"
    with pytest.raises(OverloadedError, match=message):
        one.check(1, 5)
    one.leave("a", 6)
    one.check(1, 1000)


def test_texts_that_are_read_take_room_and_are_no_requests():
    one = room()
    with one.text(8):
        assert one.num_requests == 0
        with pytest.raises(OverloadedError, match="8 prompt tokens are waiting and 3 more came"):
            one.check(1, 3)
        with one.text(1), one.text(1), pytest.raises(OverloadedError, match="3 requests are waiting"):
            one.check(1, 0)
    one.check(3, 10)
    with pytest.raises(ZeroDivisionError), one.text(8):
        raise ZeroDivisionError
    one.check(3, 10)


@pytest.mark.parametrize(("wait_s", "told_s"), [(0.2, 1.0), (7.4, 7.4), (900.0, 60.0)])
def test_when_to_ask_again_goes_by_how_long_the_last_one_waited(wait_s, told_s):
    one = room(max_requests=1)
    one.enter("a", 1)
    one.last_wait_s = wait_s
    with pytest.raises(OverloadedError, match=f"try again in {told_s:.0f} s") as caught:
        one.check(1, 1)
    assert caught.value.retry_after_s == told_s
