import dataclasses
import re
from typing import get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.options import EngineOptions, SamplingOptions, expands
from octavo.cli.serve import _NAMES as SERVE_NAMES
from octavo.cli.serve import ServeOptions
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.sampling_params import SamplingParams
from octavo.serve.settings import ServeSettings


def test_engine_options_are_engine_config_fields_with_nothing_said_by_default():
    assert EngineOptions().llm_kwargs() == {}
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    named = {field.name for field in dataclasses.fields(EngineOptions)}
    named -= {"no_prefix_caching", "no_overlap", "eager"}  # these switch a field off, or have another name
    assert named <= known


def test_what_is_said_reaches_the_engine():
    options = EngineOptions(block_size=32, kv_cache_memory="1GiB", no_prefix_caching=True)
    assert options.llm_kwargs() == {
        "block_size": 32,
        "kv_cache_memory": "1GiB",
        "enable_prefix_caching": False,
    }


def test_switches_set_what_they_switch():
    options = EngineOptions(no_overlap=True, eager=True, run_ahead=2, cascade_attention=True)
    assert options.llm_kwargs() == {
        "overlap": False,
        "enforce_eager": True,
        "run_ahead": 2,
        "cascade_attention": True,
    }


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [([], None), (["--cascade-attention"], True), (["--no-cascade-attention"], False)],
)
def test_a_switch_of_two_ways_leaves_the_default_alone(arguments, asked):
    app = typer.Typer()
    said = []

    @app.command()
    @expands(engine=EngineOptions)
    def command(*, engine: EngineOptions) -> None:
        said.append(engine.llm_kwargs())
        assert engine.config("m").cascade_attention is asked

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert said == [{} if asked is None else {"cascade_attention": asked}]


def test_sampling_options_lie_over_the_defaults():
    defaults = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5)
    assert SamplingOptions().apply(defaults) == defaults
    changed = SamplingOptions(temperature=0.0, max_tokens=9, stop=["a", "b"]).apply(defaults)
    assert (changed.temperature, changed.top_p, changed.max_tokens) == (0.0, 0.9, 9)
    assert tuple(changed.stop) == ("a", "b")


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(SamplingOptions)])
def test_every_sampling_option_is_a_field_of_sampling_params(option):
    assert option in {field.name for field in dataclasses.fields(SamplingParams)}


def test_contradictory_values_are_refused_by_sampling_params():
    with pytest.raises(OctavoError, match="min_tokens"):
        SamplingOptions(min_tokens=9, max_tokens=3).apply(SamplingParams())


@pytest.mark.parametrize(
    ("group", "settings", "names"),
    [
        (EngineOptions, EngineConfig(model="m"), {}),
        (SamplingOptions, SamplingParams(), {}),
        (ServeOptions, ServeSettings(), SERVE_NAMES),
    ],
)
def test_the_default_in_a_help_text_is_that_of_the_field(group, settings, names):
    told = 0
    for name, hint in get_type_hints(group, include_extras=True).items():
        default = getattr(settings, names.get(name, name), None)
        said = re.search(r"Default: ([\w.]+?)[.,](?: |$)", hint.__metadata__[0].help)
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert said, f"{name} tells no default"
            assert float(said[1]) == default, name
            told += 1
        elif isinstance(default, str):
            assert said, f"{name} tells no default"
            assert said[1] == default, name
            told += 1
    assert told >= 6


def test_a_group_is_expanded_and_collected_again():
    @expands(engine=EngineOptions)
    def command(model: str, *, engine: EngineOptions) -> tuple[str, EngineOptions]:
        return model, engine

    names = list(command.__signature__.parameters)
    assert names == ["model", *(field.name for field in dataclasses.fields(EngineOptions))]
    values = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    assert command(model="m", **values) == ("m", EngineOptions())
