"""Transformers' continuous batching on Octavo's kernels: requests of any length share one paged cache.

Needs, in a clone: pip install -e '.[transformers]'

With a model of the Hugging Face hub the two lines about a folder fall away:
AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", attn_implementation="octavo").
"""

import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from octavo.bench.hf_folder import write_hf_folder
from octavo.integrations.transformers import register
from octavo.models.source import resolve_model
from octavo.text.tokenizer import load_tokenizer

register()  # from here on Transformers knows attn_implementation="octavo"

built_in = resolve_model("smollm2-135m")
tokenizer = load_tokenizer(built_in)
with tempfile.TemporaryDirectory() as folder:
    write_hf_folder(built_in, Path(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="octavo")

prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]
outputs = model.generate_batch(
    [tokenizer.encode(prompt) for prompt in prompts],
    generation_config=GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0),
    # On a GPU leave both out: the cache then takes what memory there is.
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256),
)
for prompt, output in zip(prompts, outputs.values(), strict=True):
    print(f"{prompt!r} -> {tokenizer.decode(output.generated_tokens)!r}")
