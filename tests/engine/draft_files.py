"""Writers of checkpoints with MTP layers or EAGLE-3 heads, for tests."""

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
    """A model (`base`) with an MTP layer. `alone` is a model whose only layer is the MTP layer, and whose inputs are
    embeddings joined with states. The tensors are the weights of this join."""

    base: Any
    alone: Any
    embedding_norm: Tensor
    hidden_norm: Tensor
    joined: Tensor

    def logits(self, text: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last state and the logits of the MTP layer. `text` has all tokens. `states` has the states
        of the model for all tokens except the last.

        As published, the normed embedding of each token from the second on is joined with the normed state of the
        previous token: both are concatenated and multiplied by a matrix. A layer, a norm and the model's output head
        follow.
        """
        embedded = self.normed(self.base.model.embed_tokens.weight[text[1:]], self.embedding_norm)
        joined = torch.cat((embedded, self.normed(states, self.hidden_norm)), dim=-1) @ self.joined.T
        last = self.alone.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1:]
        return last, (last @ self.base.lm_head.weight.T)[0]

    def normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.base.config.rms_norm_eps)
        return rows * scale * weight


def write_mtp(config: PretrainedConfig, where: Path, *, agrees: bool = False) -> MtpFiles:
    """Write a random model with an MTP layer. If `agrees`, the next token depends mostly on the last token, both for
    the model and for the MTP layer, so that most guesses are right."""
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


@dataclass
class EagleFiles:
    """A model, and the tensors of an EAGLE-3 head for this model. The head has one layer, whose attention heads have
    the same sizes as those of the model."""

    base: Any
    tensors: dict[str, Tensor]
    prefix: str
    targets: Tensor

    def states(self, text: list[int]) -> Tensor:
        """Return the vectors that the head reads: the states before layers 2, n / 2 and n - 3, concatenated and
        multiplied by a matrix. n is the number of layers."""
        every = self.base.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        layers = len(every) - 1
        read = [every[layer][0] for layer in (2, layers // 2, layers - 3)]
        return torch.cat(read, dim=-1) @ self.tensors["fc.weight"].T

    def logits(self, text: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last state and the logits of the head. `text` has all tokens. `states` has the vectors for all
        tokens except the last.

        As published, the normed embedding of each token from the second on is concatenated with the normed vector of
        the previous token. The result is the input of attention. The residual is the vector before the norm. A gated
        MLP, a norm and the output head follow.
        """
        config, count = self.base.config, len(states)
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        embedded = self.normed(self.base.model.embed_tokens.weight[text[1:]], "input_layernorm")
        rows = torch.cat((embedded, self.normed(states, "hidden_norm")), dim=-1)
        q, k, v = (rows @ self.of(f"self_attn.{name}_proj").T for name in "qkv")
        q, k, v = (one.view(count, -1, size).transpose(0, 1) for one in (q, k, v))
        angles = torch.arange(count)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (one * cosine + torch.cat((-one[..., size // 2 :], one[..., : size // 2]), -1) * sine for one in (q, k))
        k, v = (one.repeat_interleave(heads // kv_heads, 0) for one in (k, v))
        scores = (q @ k.transpose(1, 2) * size**-0.5).masked_fill(~torch.ones(count, count).tril().bool(), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        hidden = states + attended @ self.of("self_attn.o_proj").T
        rows = self.normed(hidden, "post_attention_layernorm")
        gate, up = rows @ self.of("mlp.gate_proj").T, rows @ self.of("mlp.up_proj").T
        last = (hidden + torch.nn.functional.silu(gate) * up @ self.of("mlp.down_proj").T)[-1:]
        logits = torch.full((config.vocab_size,), -torch.inf)
        logits[self.targets] = (self.normed(last, "", "norm.weight") @ self.tensors["lm_head.weight"].T)[0]
        return last, logits

    def of(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def normed(self, rows: Tensor, name: str, full: str = "") -> Tensor:
        weight = self.tensors[full] if full else self.of(name)
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def write_eagle(
    config: PretrainedConfig, where: Path, prefix: str = "midlayer.", *, agrees: bool = False
) -> EagleFiles:
    """Write a random model and, in the folder `eagle`, an EAGLE-3 head. The vocabulary of the head has about 4 of 5
    tokens of the model. `agrees` has the same meaning as in `write_mtp`."""
    base = reference(config)
    size, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    targets = torch.tensor([token for token in range(vocabulary) if token % 5])
    shapes = {
        "self_attn.q_proj": (heads, 2 * size), "self_attn.k_proj": (kv_heads, 2 * size),
        "self_attn.v_proj": (kv_heads, 2 * size), "self_attn.o_proj": (size, heads), "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner), "input_layernorm": (size,),
        "hidden_norm": (size,), "post_attention_layernorm": (size,),
    }  # fmt: skip
    tensors = {
        f"{prefix}{name}.weight": torch.randn(shape) * 0.15 + (len(shape) == 1) for name, shape in shapes.items()
    }
    tensors |= {"fc.weight": torch.randn(size, 3 * size) * 0.15, "norm.weight": torch.rand(size) + 0.5}
    tensors["lm_head.weight"] = torch.randn(len(targets), size) * 0.15
    if agrees:  # each token attends mostly to itself, so attention copies its embedding
        for name, weight in base.named_parameters():
            if weight.ndim > 1 and "embed" not in name and "lm_head" not in name:
                weight.data *= 0.3
        base.model.norm.weight.data.fill_(1)
        tensors = {name: one * (1 if one.ndim == 1 else 0.05) for name, one in tensors.items()}
        copies, group = torch.eye(kv_heads, 2 * size), config.num_attention_heads // config.num_key_value_heads
        tensors[f"{prefix}self_attn.v_proj.weight"] = copies
        tensors[f"{prefix}self_attn.k_proj.weight"] = 2 * copies
        by_head = copies.view(-1, config.head_dim, 2 * size).repeat_interleave(group, 0)
        tensors[f"{prefix}self_attn.q_proj.weight"] = 2 * by_head.flatten(0, 1)
        tensors["lm_head.weight"] = base.lm_head.weight.data[targets].clone()
        tensors["norm.weight"] = torch.ones(size)
        tensors[f"{prefix}input_layernorm.weight"] = torch.ones(size)
        output = torch.zeros(size, heads)
        for at in range(min(size, kv_heads)):
            head, column = divmod(at, config.head_dim)
            output[at, head * group * config.head_dim + column] = 1
        tensors[f"{prefix}self_attn.o_proj.weight"] = output
    base.save_pretrained(where)
    (where / "eagle").mkdir()
    kept = torch.zeros(vocabulary, dtype=torch.bool)
    kept[targets] = True
    maps = {"d2t": targets - torch.arange(len(targets)), "t2d": kept}
    save_file(tensors | maps, where / "eagle" / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": size, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": config.num_attention_heads, "hidden_act": "silu",
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim, "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary, "draft_vocab_size": len(targets), "max_position_embeddings": 256,
    }  # fmt: skip
    (where / "eagle" / "config.json").write_text(json.dumps(values))
    return EagleFiles(base, tensors, prefix, targets)
