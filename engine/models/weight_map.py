"""The names of a checkpoint's tensors, which differ between families."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of a layer with experts. `each` is the prefix of an expert's names, with {} for its number.

    If `stacked`, one tensor holds all experts, [experts, in, out], and gate and up alternate in it (gpt-oss). If
    `fused`, one tensor holds all experts, [experts, out, in], with the rows of gate before those of up. If
    `router_scale` names a tensor, the columns of the router are multiplied by this tensor and by hidden_size ** -0.5
    (Gemma 4)."""

    each: str = "mlp.experts.{}"
    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    correction: str = ""
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    stacked: bool = False
    fused: bool = False
    router_scale: str = ""
    scales: str = ""


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Names of a layer's tensors, without the layer's prefix. Several names in a field are the parts of one matrix.

    If `norms_are_offsets`, the checkpoint stores w - 1 for each weight w of a norm. Tensors whose names begin with one
    of `unused` are not loaded.
    """

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    post_mlp_norm: str = ""
    experts: ExpertNames = ExpertNames()
    norms_are_offsets: bool = False
    mlp: str = "mlp"
    recurrent: str = "linear_attn"
    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    unused: tuple[str, ...] = ()


LLAMA = WeightMap()
