"""A tiny model for real servers: random weights, and room for answers that would take minutes to end."""

import pytest
from helpers.tiny_model import write_model_folder

MAX_MODEL_LEN = 32_768


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_model_folder(folder, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """What loads it, as arguments of a command. Its cache holds 4,096 blocks of 16 tokens."""
    return tiny_folder, "--load-format", "dummy", "--num-threads", "1", "--num-blocks", "4096"
