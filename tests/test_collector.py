from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from octavo.collector import no_collections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was = gc.isenabled(), gc.get_threshold()
    gc.enable()
    yield
    gc.set_threshold(*was[1])
    (gc.enable if was[0] else gc.disable)()


def collections_while(make: int) -> int:
    """How many there are while so many objects are made that stay."""
    seen: list[str] = []

    def see(phase: str, _: object) -> None:
        seen.append(phase)

    gc.callbacks.append(see)
    try:
        kept = [[] for _ in range(make)]
    finally:
        gc.callbacks.remove(see)
    assert len(kept) == make
    return len(seen)


def test_nothing_is_collected() -> None:
    gc.set_threshold(100)
    assert collections_while(make=10_000) > 10
    with no_collections():
        assert collections_while(make=10_000) == 0
    assert gc.isenabled()
    assert collections_while(make=10_000) > 10


def test_collections_come_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), no_collections():
        _ = 1 / 0
    assert gc.isenabled()


def test_who_has_none_keeps_none() -> None:
    gc.disable()
    with no_collections():
        pass
    assert not gc.isenabled()
