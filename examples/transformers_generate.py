"""Transformers' `generate` on Octavo's kernels: three prompts in one batch, padded on the left.

Needs, in a clone: pip install -e '.[transformers]'

With a model of the Hugging Face hub the two lines about a folder fall away:
AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", attn_implementation="octavo").
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from octavo.bench.hf_folder import write_hf_folder
from octavo.integrations.transformers import fuse, register
from octavo.models.source import resolve_model
from octavo.text.tokenizer import load_tokenizer

register()  # from here on Transformers knows attn_implementation="octavo"

built_in = resolve_model("smollm2-135m")
tokenizer = load_tokenizer(built_in)
with tempfile.TemporaryDirectory() as folder:
    write_hf_folder(built_in, Path(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="octavo")
print("fused:", fuse(model))  # norms, MLPs and rotary embeddings, too; unfuse(model) undoes it

prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]
rows = [tokenizer.encode(prompt) for prompt in prompts]
longest = max(map(len, rows))
input_ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
attention_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])

output = model.generate(
    input_ids, attention_mask=attention_mask, max_new_tokens=12, do_sample=False, pad_token_id=0
)
for prompt, ids in zip(prompts, output[:, longest:].tolist(), strict=True):
    print(f"{prompt!r} -> {tokenizer.decode(ids)!r}")
