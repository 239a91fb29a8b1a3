"""Every test has `octavo` registered, and can see which path computed what."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.integrations import transformers as integration
from octavo.integrations.transformers import dense, paged, stock


@pytest.fixture(autouse=True, scope="package")
def quick_collections() -> Iterator[None]:
    """Continuous batching collects garbage twice in a run: half a second each, without this."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.fixture
def computed_by(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many layers each path computed: `dense`, `varlen`, `block table`; `stock` is Transformers' own."""
    counts: Counter[str] = Counter()

    def watch(module: Any, name: str) -> None:
        before = module.attend

        def attend(*args: Any, **kwargs: Any) -> Any:
            block_table = kwargs.get("block_table") is not None
            found = before(*args, **kwargs)
            if found is not None:  # a layer without a kernel goes on to another path
                counts[name or ("block table" if block_table else "varlen")] += 1
            return found

        monkeypatch.setattr(module, "attend", attend)

    watch(dense, "dense")
    watch(stock, "stock")
    watch(paged, "")
    return counts
