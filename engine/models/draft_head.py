"""Draft heads: layers that guess further tokens from a model's hidden states."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionPlan
from engine.batch import Batch
from engine.kernels import StepKernels
from engine.linear import Linear, Lookup
from engine.models.decoder import AttentionDecoderLayer, Decoder, store_kv
from engine.models.draft_layers import EagleSpec
from engine.models.spec import ModelConfig

NO_LOGIT = -1e9  # logit of a token outside of the head's vocabulary; finite, because sampling refuses infinite logits


class HeadDecoder(Decoder):
    """A draft head: a decoder with one layer.

    The input at a position is the position's token and the model's hidden state at the previous position. This pair
    describes the text up to the token, so that the head can guess the next token. For each further guess, the head's
    own hidden state replaces the model's.

    This class implements an MTP layer ("DeepSeek-V3 Technical Report", 2024, section 2.2): a projection maps the normed
    embedding and the normed hidden state to one vector. The layer uses the model's embedding and output head.
    """

    captured: tuple[int, ...] = ()  # the head reads the hidden states before these layers of the model

    def __init__(
        self, config: ModelConfig, embed: Lookup, layer: AttentionDecoderLayer, norm: Tensor, head: Linear,
        pair: "PairWeights",
    ) -> None:  # fmt: skip
        super().__init__(config, embed, [layer], norm, head)
        self._layer, self._pair = layer, pair

    def features(self, normed: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        """Return the vectors that the head reads, one for each position. `normed`, [T, hidden_size], has the
        model's hidden states after the last norm. `states` maps each layer in `captured` to the states before it."""
        return normed

    def inputs(self, tokens: Tensor, features: Tensor, kernels: StepKernels) -> tuple[Tensor, Tensor]:
        """Return the residual and the input of attention. For position i, both results are computed from tokens[i],
        int64 [T], and features[i]."""
        embedded = kernels.norm(self.embedded(tokens), self._pair.embedding_norm)
        states = kernels.norm(features, self._pair.hidden_norm)
        hidden = self._pair.joined(torch.cat((embedded, states), dim=-1))
        return hidden, kernels.norm(hidden, self._layer.attention_norm)

    @torch.inference_mode()
    def store(self, batch: Batch, features: Tensor, kernels: StepKernels) -> None:
        """Store the KV of each position, which is computed from the position's token and features."""
        store_kv(self._layer, self.inputs(batch.tokens, features, kernels)[1], kernels)

    @torch.inference_mode()
    def guess(
        self, batch: Batch, features: Tensor, kernels: StepKernels, attention: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Store the same KV as `store`. Return the features for the next guess, and the logits of this guess."""
        hidden, normed = self.decode(*self.inputs(batch.tokens, features, kernels), batch, kernels, attention)
        return self.own_features(hidden, normed), self.logits(normed)

    def own_features(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Return the features for the next guess, from the head's states before and after its last norm."""
        return normed


@dataclass(frozen=True, slots=True)
class PairWeights:
    """The norms of an embedding and of a hidden state, and a projection that maps the two normed vectors to one vector.
    In EAGLE-3, the projection instead maps the states of several layers to one vector."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    joined: Linear


class EagleDecoder(HeadDecoder):
    """An EAGLE-3 head ("EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    Li et al. 2025).

    A linear layer projects three of the model's hidden states to one vector, which is the residual. The input of
    attention is the concatenation of the normed embedding and the normed vector. The head has its own vocabulary of n
    tokens: logit i belongs to the model's token targets[i], int64 [n]. Other tokens are never guessed.
    """

    def __init__(
        self, config: ModelConfig, embed: Lookup, layer: AttentionDecoderLayer, norm: Tensor, head: Linear,
        pair: "PairWeights", eagle: EagleSpec, targets: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(config, embed, layer, norm, head, pair)
        self.captured = eagle.captured
        self._norms_residual, self._targets = eagle.norms_residual, targets

    @torch.inference_mode()
    def features(self, normed: Tensor, states: Mapping[int, Tensor]) -> Tensor:
        return self._pair.joined(torch.cat([states[layer] for layer in self.captured], dim=-1))

    def inputs(self, tokens: Tensor, features: Tensor, kernels: StepKernels) -> tuple[Tensor, Tensor]:
        states = kernels.norm(features, self._pair.hidden_norm)
        normed = torch.cat((kernels.norm(self.embedded(tokens), self._pair.embedding_norm), states), dim=-1)
        return states if self._norms_residual else features, normed

    def own_features(self, hidden: Tensor, normed: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        own = super().logits(hidden)
        return own.new_full((len(own), self.config.vocab_size), NO_LOGIT).index_copy_(1, self._targets, own)
