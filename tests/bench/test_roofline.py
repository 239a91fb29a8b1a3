"""Floors from rates, and the picture."""

import builtins

import pytest

from octavo.bench.roofline import Ceilings, Point, plot
from octavo.errors import ConfigError

CEILINGS = Ceilings(4e12, 3e12, 8e14, empty_kernel_us=1.1)


@pytest.mark.parametrize(
    ("bytes_moved", "flops", "copies", "floor"),
    [
        (40e6, 0.0, False, 10.0),  # reading
        (30e6, 0.0, True, 10.0),  # reading and writing
        (40e6, 16e9, False, 20.0),  # multiplying takes longer than reading
        (100.0, 100.0, False, 1.1),  # nothing to do: the launch
    ],
)
def test_the_floor_is_the_longest_of_its_reasons(bytes_moved, flops, copies, floor):
    assert CEILINGS.floor_us(bytes_moved, flops, copies) == pytest.approx(floor)


def test_ceilings_for_a_file():
    assert CEILINGS.as_dict() == {
        "read TB/s": 4.0,
        "copy TB/s": 3.0,
        "bf16 matmul TFLOP/s": 800.0,
        "empty kernel us": 1.1,
    }


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    points = [Point("decode/1x8", 2.0, 7e12), Point("prefill/1x8", 900.0, 6e14)]
    plot(points, CEILINGS, "a GPU", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot([], CEILINGS, "nothing measured", path)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name == "matplotlib.figure":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib: pip install 'octavo\[plot\]'"):
        plot([], CEILINGS, "", tmp_path / "x.png")
