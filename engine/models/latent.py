"""The products of latent attention, in absorbed form.

A head's score for a latent c is q K = q (c U) = (q U^T) c, where U are the weights of the head's keys. It is therefore
sufficient to multiply each query by U once, instead of each stored latent. In the same way, the weights of the values
multiply the result of attention, instead of each stored latent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from engine.linear import Linear
from engine.models.spec import LatentSpec

EPSILON = 1e-6  # epsilon of the norms of latents, in all checkpoints


class HeadProducts:
    """One matrix for each head. On a CPU, the matrices in `each` are multiplied one by one, because a row's result must
    not depend on other rows. On other devices, one operation multiplies all heads by `weights`, [heads, out, in]."""

    def __init__(self, each: list[Linear], weights: Tensor | None) -> None:
        self._each = each
        self._weights = weights

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply `rows` [T, heads, in]. Return [T, heads, out]."""
        by_head = rows.transpose(0, 1).contiguous()
        if self._weights is not None:
            return torch.bmm(by_head, self._weights.transpose(1, 2)).transpose(0, 1)
        return torch.stack([linear(one) for linear, one in zip(self._each, by_head, strict=True)], dim=1)


@dataclass(slots=True)
class LatentProducts:
    spec: LatentSpec
    queries: Linear  # [heads * (nope_dim + rope_dim), q_rank or hidden_size]
    absorb: HeadProducts  # maps the unrotated part of a query to a query that is compared with latents
    values: HeadProducts  # maps weighted latents to weighted values

    def derive(
        self, rows: Tensor, down: Tensor, q_norm: Tensor | None, kv_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return queries [T, heads, width] and latents [T, width], before rotation.

        `rows` are hidden states. `down` [T, q_rank + width] is their product with the layer's first matrix.
        """
        spec = self.spec
        assert kv_norm is not None
        if q_norm is not None:
            rows = rms_norm(down[:, : spec.q_rank], q_norm.shape, q_norm, EPSILON)
        q = self.queries(rows).view(-1, spec.heads, spec.nope_dim + spec.rope_dim)
        q = torch.cat((self.absorb(q[..., : spec.nope_dim]), q[..., spec.nope_dim :]), dim=-1)
        latents, key = torch.split(down[:, spec.q_rank :], [spec.kv_rank, spec.rope_dim], dim=-1)
        return q, torch.cat((rms_norm(latents, kv_norm.shape, kv_norm, EPSILON), key), dim=-1)
