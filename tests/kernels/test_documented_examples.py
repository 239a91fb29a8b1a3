"""The examples of docs/kernels.md run, one after the other, as a reader would paste them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["out"].shape == (6, 8, 64)  # type: ignore[attr-defined]
