"""A tiny model folder (random weights, byte tokenizer, chat template), and the command line in-process."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 258,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


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
