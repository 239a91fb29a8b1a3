"""`ServeSettings`: what is refused, by name."""

from dataclasses import replace

import pytest

from octavo.errors import ConfigError
from octavo.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("host", 3),
        ("port", -1),
        ("port", 65_536),
        ("port", "8000"),
        ("port", True),
        ("max_body_bytes", 0),
        ("max_waiting_requests", 0),
        ("max_waiting_requests", 1.5),
        ("max_waiting_tokens", -1),
        ("request_timeout_s", 0),
        ("request_timeout_s", float("nan")),
        ("slow_reader_s", float("inf")),
        ("idle_connection_s", -1),
        ("drain_s", -0.1),
        ("drain_s", "3"),
        ("stuck_s", 0),
        ("served_model_names", "one"),
        ("served_model_names", ["a", ""]),
        ("cors_origins", [3]),
        ("cors_origins", ["https://a.example/"]),
        ("cors_origins", ["a.example"]),
        ("cors_origins", ["https://a.example/page"]),
        ("cors_origins", ["https://A.example"]),
        ("cors_origins", ["https://*.example", ""]),
        ("log_format", "xml"),
        ("tool_parser", ""),
        ("tool_parser", "llama"),
        ("reasoning_parser", "hermes"),
        ("otlp_endpoint", "localhost:4317"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        ServeSettings(**{name: value})


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown server option 'prot' \(did you mean 'port'\?\)"):
        ServeSettings.from_options(prot=1)


@pytest.mark.parametrize("keys", ["secret", ["se cret"], ["sécret"], [3], [""]])
def test_keys_are_checked_and_never_shown(keys):
    with pytest.raises(ConfigError, match="api_keys") as refused:
        ServeSettings(api_keys=keys)
    assert "cret" not in str(refused.value)
    assert "secret" not in repr(ServeSettings(api_keys=["secret"]))


def test_lists_become_tuples_and_replace_checks():
    settings = ServeSettings(served_model_names=["a"], drain_s=0)
    assert settings.served_model_names == ("a",)
    assert replace(settings, port=0).port == 0
    with pytest.raises(ConfigError):
        replace(settings, port=-1)


def test_origins_are_what_browsers_send():
    origins = ("*", "https://a.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc")
    assert ServeSettings(cors_origins=origins).cors_origins == origins
