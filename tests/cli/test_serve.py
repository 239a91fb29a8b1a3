"""`octavo serve` up to the point where the server starts; tests/serve has the rest."""

import builtins
import subprocess
import sys
from dataclasses import fields

import pytest

from octavo.cli.serve import ServeOptions
from octavo.serve import run
from octavo.serve.settings import ServeSettings

SAID = {
    "served_model_name": ["a", "b"],
    "api_key": ["k"],
    "cors_origin": ["*"],
    "request_timeout": 5.0,
    "slow_reader": 6.0,
    "idle_connection": 7.0,
    "drain": 8.0,
    "stuck": 9.0,
}


@pytest.fixture
def started(monkeypatch):
    """What `octavo.serve.run.serve` was called with, in place of a server."""
    calls = []
    monkeypatch.setattr(run, "serve", lambda config, settings, say: calls.append((config, settings)))
    return calls


def test_every_setting_can_be_said_and_nothing_else_can():
    everything = ServeOptions(**{f.name: SAID.get(f.name, f.name) for f in fields(ServeOptions)}).settings()
    assert everything.pop("api_key_file")
    assert everything.keys() == {f.name for f in fields(ServeSettings)}
    assert ServeOptions().settings() == {}


def test_what_is_said_reaches_the_server(octavo, started, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-2\n")
    status, _, err = octavo(
        *("serve", "some/model", "--port", "0", "--api-key", "secret-1", "--api-key-file", keys),
        *("--served-model-name", "a", "--served-model-name", "b", "--drain", "3", "--max-model-len", "128"),
    )
    assert (status, err) == (0, "")
    ((config, settings),) = started
    assert (config.model, config.max_model_len) == ("some/model", 128)
    assert settings == ServeSettings(
        port=0, api_keys=("secret-1", "secret-2"), served_model_names=("a", "b"), drain_s=3.0
    )


@pytest.mark.parametrize(
    ("options", "expected", "message"),
    [
        (("--port", "70000"), 2, "--port must be an int from 0 to 65535; got 70000"),
        (("--stuck", "0"), 2, "--stuck must be seconds, above 0"),
        (("--log-format", "xml"), 2, "--log-format must be one of 'text', 'json'"),
        (("--api-key", "a b"), 1, "has a space"),
        (("--api-key-file", "/no/such/file"), 1, "api_key_file: '/no/such/file' cannot be read"),
        (("--block-size", "3"), 2, "--block-size must be a power of two"),
        (("--kv-cache-memory", "banana"), 2, "--kv-cache-memory must be a positive size"),
    ],
)
def test_bad_values_are_one_line(octavo, started, options, expected, message):
    status, out, err = octavo("serve", "some/model", *options)
    assert (status, out, started) == (expected, "", [])
    assert err.startswith("octavo: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "missing", "message", "requirement"),
    [
        (
            (),
            "fastapi",
            "serving needs the package fastapi",
            "octavo[serve]",
        ),
        (
            ("--otlp-endpoint", "http://127.0.0.1:4318"),
            "opentelemetry",
            "otlp_endpoint needs the package opentelemetry",
            "octavo[otel]",
        ),
        (
            ("--otlp-endpoint", "http://127.0.0.1:4318"),
            "fastapi",
            "serving needs the package fastapi",
            "octavo[serve]",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_way_to_get_it(
    octavo, monkeypatch, options, missing, message, requirement
):
    import_module = builtins.__import__

    def without_server(name, *arguments):
        if name == "octavo.serve.guard":
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        return import_module(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_server)
    status, _, err = octavo("serve", "some/model", *options)
    assert status == 1
    assert err.strip() == f"octavo: error: {message}; install what it takes with: pip install '{requirement}'"


LOGGING = "import logging; logging.getLogger('octavo').addHandler(logging.StreamHandler())"


def test_a_reader_that_goes_away_ends_no_server():
    """`octavo serve MODEL | grep -m1 ready`."""
    program = f"""
{LOGGING}
import sys
from octavo.cli.serve import _say
_say("octavo: loading")
sys.stdin.readline()
_say("octavo: ready")
_say("octavo: stopped")
print("goes on", file=sys.stderr)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen((sys.executable, "-c", program), text=True, **pipes) as process:
        assert process.stdout.readline() == "octavo: loading\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        said = process.stderr.read()
    assert said == "standard output gets no more lines: Broken pipe\ngoes on\n"
    assert process.returncode == 0


def test_a_full_disk_behind_standard_output_ends_no_server():
    program = f"{LOGGING}\nfrom octavo.cli.serve import _say; _say('octavo: loading'); _say('octavo: ready')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            (sys.executable, "-c", program), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 0
    assert done.stderr == "standard output gets no more lines: No space left on device\n"
