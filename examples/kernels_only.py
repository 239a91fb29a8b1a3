"""The kernels alone: write keys and values into a paged cache, then attend to it. No engine is loaded.

Tensors on a GPU run the GPU's kernels, tensors on the CPU the CPU's; there is nothing else to set.
"""

import torch

from octavo.kernels import backend, flash_attn_varlen_func, write_kv_cache

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
num_heads, num_kv_heads, head_dim, block_size = 9, 3, 64, 16
k_cache, v_cache = torch.zeros(2, 8, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)

# One sequence of 20 tokens in blocks 5 and 2: token i lives at slot table[i // 16] * 16 + i % 16.
block_table = torch.tensor([[5, 2]], dtype=torch.int32, device=device)
slots = torch.tensor([*range(5 * 16, 5 * 16 + 16), *range(2 * 16, 2 * 16 + 4)], device=device)
k, v = torch.randn(2, 20, num_kv_heads, head_dim, dtype=dtype, device=device)
write_kv_cache(k, v, k_cache, v_cache, slots)

# Its last three tokens ask; each sees what stands before it and itself.
q = torch.randn(3, num_heads, head_dim, dtype=dtype, device=device)
cu_seqlens_q = torch.tensor([0, 3], dtype=torch.int32, device=device)
cu_seqlens_k = torch.tensor([0, 20], dtype=torch.int32, device=device)
out = flash_attn_varlen_func(
    q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, 3, 20, causal=True, block_table=block_table
)

expected = torch.nn.functional.scaled_dot_product_attention(
    q.transpose(0, 1),
    k.transpose(0, 1),
    v.transpose(0, 1),
    attn_mask=torch.ones(3, 20, dtype=torch.bool, device=device).tril(17),
    enable_gqa=True,
).transpose(0, 1)
print(f"{tuple(out.shape)}, largest difference from dense attention {(out - expected).abs().max():.1e}")
print("answered by:", backend.implementation_of("varlen_attention", device, dtype, dtype, head_dim))
