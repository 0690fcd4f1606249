"""Checkpoints with the layers of drafters, written for tests."""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from tests.engine.families import reference

NUMBERED = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
NAMES = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN)
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": None, "decoder_sparse_step": 1}


@dataclass
class MtpFiles:
    """A model, a model of its MTP layer alone, which takes the joined states as embeddings, and what joins them."""

    base: Any
    alone: Any
    embedding_norm: Tensor
    hidden_norm: Tensor
    joined: Tensor

    def logits(self, text: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's last state and logits, from all tokens and the model's states before the last token.

        As published: the normed embedding of each token from the second on and the normed state before it are joined by
        a product, and a layer, a norm and the model's output head follow.
        """
        embedded = self.normed(self.base.model.embed_tokens.weight[text[1:]], self.embedding_norm)
        joined = torch.cat((embedded, self.normed(states, self.hidden_norm)), dim=-1) @ self.joined.T
        last = self.alone.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1:]
        return last, (last @ self.base.lm_head.weight.T)[0]

    def normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.base.config.rms_norm_eps)
        return rows * scale * weight


def write_mtp(config: PretrainedConfig, where: Path, *, agrees: bool = False) -> MtpFiles:
    """Write a random model with an MTP layer. If it `agrees`, the next token depends mostly on the last one, for the
    model and for the MTP layer, so that most guesses are right."""
    is_hybrid = config.model_type in NAMES
    one_layer = ONE_LAYER | ({"layer_types": ["full_attention"]} if is_hybrid else {})
    base, alone = reference(config), reference(type(config)(**deepcopy(config).to_dict() | one_layer))
    size = config.hidden_size
    joined = torch.randn(size, 2 * size) * 0.15
    if agrees:
        for name, weight in (*base.named_parameters(), *alone.named_parameters()):
            if weight.ndim > 1 and "embed" not in name and "lm_head" not in name:
                weight.data *= 0.3
        base.model.norm.weight.data.fill_(1)
        alone.model.norm.weight.data.fill_(1)
        joined = torch.eye(size, 2 * size)
    alone.lm_head.weight = base.lm_head.weight
    norms = [torch.rand(size) * 0.3 + 1 for _ in range(2)]
    files = MtpFiles(base, alone, *(one + is_hybrid for one in norms), joined)
    base.save_pretrained(where)
    alone.save_pretrained(where / "alone")
    prefix = f"model.layers.{config.num_hidden_layers}."
    numbered = (prefix, *(prefix + name for name in NUMBERED))
    prefix, *names, norm = NAMES.get(config.model_type, numbered)
    more = zip(names, (*norms, joined), strict=True)
    tensors = load_file(where / "model.safetensors") | {f"{name}.weight": one for name, one in more}
    for name, tensor in load_file(where / "alone" / "model.safetensors").items():
        if name == "model.norm.weight":
            tensors[f"{norm}.weight"] = tensor
        elif name.startswith("model.layers.0."):
            tensors[prefix + name.removeprefix("model.layers.0.")] = tensor
    save_file(tensors, where / "model.safetensors")
    values = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(values | ({} if is_hybrid else {"num_nextn_predict_layers": 1})))
    return files
