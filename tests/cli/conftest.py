"""A tiny model folder (random weights, byte tokenizer, chat template), and the command line in-process."""

import json

import pytest
from helpers.tiny_model import CONFIG, write_model_folder

from octavo.cli.main import main


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def octavo(capsys):
    """`octavo(*arguments)` -> (exit status, standard output, standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def tiny(model_folder):
    """The model argument and the options that load it."""
    return model_folder, "--load-format", "dummy", "--num-threads", "1", "--num-blocks", "64"


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory):
    """A model without tokenizer whose vocabulary holds every id of the benchmark workloads."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 10_001}))
    return folder


@pytest.fixture
def wide(wide_folder):
    return wide_folder, "--load-format", "dummy", "--num-threads", "1", "--num-blocks", "64"
