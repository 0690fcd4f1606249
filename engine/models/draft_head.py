"""Draft heads: layers that guess further tokens from a model's hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention import AttentionPlan
from engine.batch import Batch
from engine.kernels import StepKernels
from engine.linear import Linear
from engine.models.decoder import AttentionDecoderLayer, Decoder, store_kv
from engine.models.draft_layers import mtp_layer


class HeadDecoder(Decoder):
    """A draft head: a decoder of one layer, whose input is a token and a hidden state of the model.

    The hidden state is that of the position before the token: the pair describes the text up to the token, and the
    head's result guesses the next one. For a further guess, the head's own state takes the place of the model's.

    This is an MTP layer ("DeepSeek-V3 Technical Report", 2024, section 2.2): the normed embedding and the normed state
    are joined by a product. Embedding and output head are the model's.
    """

    def __init__(self, model: Decoder, layer: AttentionDecoderLayer, norm: Tensor, pair: "PairWeights") -> None:
        config = replace(model.config, layers=(mtp_layer(model.config),), draft_layers=0)
        super().__init__(config, model.embed, [layer], norm, model.head)
        self._layer, self._pair = layer, pair
        self.feature_size = config.hidden_size  # of the vectors that the head reads and returns

    def features(self, normed: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Return what the head reads of the model's last normed states, [T, hidden_size], and of the states before the
        layers `Decoder.captured`."""
        return normed

    def inputs(self, tokens: Tensor, features: Tensor, kernels: StepKernels) -> tuple[Tensor, Tensor]:
        """Return the residual and the input of attention, for pairs of tokens, int64 [T], and features."""
        embedded = kernels.norm(self.embedded(tokens), self._pair.embedding_norm)
        states = kernels.norm(features, self._pair.hidden_norm)
        hidden = self._pair.joined(torch.cat((embedded, states), dim=-1))
        return hidden, kernels.norm(hidden, self._layer.attention_norm)

    @torch.inference_mode()
    def store(self, batch: Batch, features: Tensor, kernels: StepKernels) -> None:
        """Store the KV of pairs."""
        store_kv(self._layer, self.inputs(batch.tokens, features, kernels)[1], kernels)

    @torch.inference_mode()
    def guess(
        self, batch: Batch, features: Tensor, kernels: StepKernels, attention: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Store the KV of pairs. Return the features for the next guess, and the logits of this one."""
        hidden, normed = self.decode(*self.inputs(batch.tokens, features, kernels), batch, kernels, attention)
        return self.own_features(hidden, normed), self.logits(normed)

    def own_features(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Return the features for the next guess, from the head's states before and after its last norm."""
        return normed


@dataclass(frozen=True, slots=True)
class PairWeights:
    """The weights that join an embedding and a hidden state. `joined` maps [T, 2 * hidden_size] to half of it."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    joined: Linear
