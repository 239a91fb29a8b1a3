"""What a message suggests to someone who wrote a name that is not known."""

import pytest

from octavo.config import DEVICES, DTYPES, KV_CACHE_DTYPES, EngineConfig
from octavo.errors import ConfigError, nearest


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("gpu", DEVICES, "cuda"),
        ("GPU", DEVICES, "cuda"),
        ("CPU", DEVICES, "cpu"),
        ("half", DTYPES, "float16"),
        ("bf16", DTYPES, "bfloat16"),
        ("float8_e4m3", KV_CACHE_DTYPES, "fp8"),
        ("gpu", ("cpu",), "cpu"),  # what it means elsewhere is not known here
        ("Temperatur", ("temperature", "top_p"), "temperature"),
    ],
)
def test_the_nearest_name(name: str, known: tuple[str, ...], expected: str) -> None:
    assert nearest(name, known) == f" (did you mean {expected!r}?)"


def test_no_name_is_near() -> None:
    assert nearest("xyz", DEVICES) == nearest("", DEVICES) == ""


def test_a_gpu_is_called_cuda() -> None:
    expected = r"device must be one of 'auto', 'cpu', 'cuda'; got 'gpu' \(did you mean 'cuda'\?\)"
    with pytest.raises(ConfigError, match=expected):
        EngineConfig(model="m", device="gpu")
