"""A feed-forward layer of experts: a router sends each token to a few of them and weighs what they answer."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels import PackedExperts, grouped_linear, silu_and_mul
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm


class ExpertsMLP:
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    `router` has one row per expert; a token goes to the `num_per_token` experts of the largest softmax, whose
    weights are divided by their sum if `normalised`. `gate_up` are the experts' fused weights, gate's rows
    first. `shared` is an expert of every token, behind a sigmoid of `shared_gate`, which has one row.
    """

    def __init__(
        self,
        *,
        router: Linear,
        gate_up: PackedExperts,
        down: PackedExperts,
        num_per_token: int,
        normalised: bool,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.num_per_token = num_per_token
        self.normalised = normalised
        self.shared = shared
        self.shared_gate = shared_gate
        num_experts = gate_up.shape[0]
        self.expert_ids = torch.arange(num_experts + 1, device=gate_up.data.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden) -> (T, hidden). Nothing here waits for a GPU."""
        weights, experts = self._route(x)
        # Pair p = token * num_per_token + rank. Sorted by expert, each expert's pairs lie together.
        in_order, pairs = experts.flatten().sort(stable=True)
        offsets = torch.searchsorted(in_order, self.expert_ids, out_int32=True)
        tokens = pairs // self.num_per_token
        inner = silu_and_mul(grouped_linear(x, self.gate_up, offsets, sources=tokens))
        scale = weights.flatten()[pairs]
        answers = grouped_linear(inner, self.down, offsets, targets=pairs, scale=scale)
        mixed = answers.view(x.shape[0], self.num_per_token, x.shape[1]).sum(dim=1)
        if self.shared is None or self.shared_gate is None:
            return mixed
        # A softmax beside 0 is the sigmoid; torch's own rounds by where in the tensor a number lies.
        opening = torch.softmax(functional.pad(self.shared_gate(x), (0, 1)), dim=-1)[:, :1]
        return mixed + opening * self.shared(x)

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream x + residual with this layer of its norm, as two that are left to be added."""
        x, residual = norm.add(x, residual)
        return self(x), residual

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's weights, float32, and experts, (T, num_per_token) both."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, experts = shares.topk(self.num_per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts
