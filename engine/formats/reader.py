"""Reads the matrices of a quantized checkpoint into weight forms, and checks their scales."""

import torch
from torch import Tensor

from engine.formats.forms import E2M1, INTEGERS, ChannelWeight, GroupedWeight, Weight, packed
from engine.formats.scheme import Scheme
from engine.weights import Checkpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the eight nibbles in an AWQ integer, low bits first
UNUSED = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".kv_scale", ".activation_scale", "_proj_activation_scale", ".activation_scale_ub", ".input_scale_ub",
    ".weight_shape",
)  # fmt: skip
Codes = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # codes [out, in], scales, zeros, the group of each input


class QuantizedReader:
    """The matrices of one quantized checkpoint. A matrix is read when `load_model` requests it.

    Matrices that a checkpoint stores unquantized are returned as they are stored. Methods raise ValueError, with the
    name of the tensor, if a tensor is missing, has a wrong shape or dtype, or if a scale is not finite.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        self._files = checkpoint
        self._scheme = scheme

    def matrix(self, name: str, out: int, width: int) -> Weight:
        """Return the matrix `name`, [out, width]."""
        stored = self._files.dtype_of(f"{name}.weight")
        if stored in {"F32", "BF16", "F16"}:
            return self._files.take(f"{name}.weight", out, width)
        if self._scheme.layout == "fp8":
            return self._fp8(name, out, width)
        if self._scheme.layout == "int8":
            return self._int8(name, out, width)
        return self._grouped(name, out, width)

    def stacked(self, name: str, count: int, width: int, out: int) -> list[Weight]:
        """Return the matrices [out, width] of all experts, which the checkpoint stores in one tensor (gpt-oss)."""
        if self._files.dtype_of(name) is not None or self._scheme.layout != "mxfp4":
            return [one.T.contiguous() for one in self._files.take(name, count, width, out)]
        self._divisible(name, width, 32)
        blocks = self._files.codes(f"{name}_blocks", torch.uint8, count, out, width // 32, 16)
        scales = self._exponents(f"{name}_scales", count, out, width // 32)
        return [GroupedWeight(codes.flatten(1), E2M1, own) for codes, own in zip(blocks, scales, strict=True)]

    def fused(self, name: str, count: int, out: int, width: int) -> list[Tensor]:
        """Return the matrices [out, width] of all experts, which the checkpoint stores in one tensor (Mistral Small
        4)."""
        if self._scheme.layout != "fp8" or self._files.dtype_of(name) in {"F32", "BF16", "F16"}:
            return list(self._files.take(name, count, out, width))
        stored = self._files.codes(name, torch.float8_e4m3fn, count, out, width)
        (high, wide), own = self._scheme.block, f"{name}_scale_inv"
        if high:
            scales = self._scale(own, count, -(-out // high), -(-width // wide))
        else:  # each expert has one scale, or one scale for gate and one for up
            shape = self._files.shape_of(own)
            rows = 2 if shape == [count, 2, 1] and out % 2 == 0 else 1
            scales = self._scale(own, *([count] if shape == [count] else [count, rows, 1])).view(count, rows, 1)
            high, wide = out // rows, width
        return [
            self._finite(name, one.float() * _spread(scale, high, wide, out, width))
            for one, scale in zip(stored, scales, strict=True)
        ]

    # ---- 8 bits ------------------------------------------------------------------------------------------------

    def _fp8(self, name: str, out: int, width: int) -> Tensor:
        weight = self._files.codes(f"{name}.weight", torch.float8_e4m3fn, out, width).float()
        scale_name = next(
            (f"{name}.{suffix}" for suffix in ("weight_scale_inv", "weight_scale") if self._has(f"{name}.{suffix}")),
            f"{name}.weight_scale{'_inv' if self._scheme.method == 'fp8' else ''}",
        )
        high, wide = self._scheme.block
        if high:
            scale = _spread(self._scale(scale_name, -(-out // high), -(-width // wide)), high, wide, out, width)
        else:
            scale = self._channels(scale_name, out)[:, None]
        return self._finite(f"{name}.weight", weight * scale)

    def _finite(self, name: str, values: Tensor) -> Tensor:
        """Return the values in bfloat16. Refuse the tensor if a value is NaN or infinite."""
        dense = values.bfloat16()
        if not bool(dense.isfinite().all()):
            self._files.refuse(name, "holds NaN or infinity; download the model again")
        return dense

    def _int8(self, name: str, out: int, width: int) -> Weight:
        levels = self._files.codes(f"{name}.weight", torch.int8, out, width)
        if self._has(f"{name}.weight_zero_point"):
            self._files.refuse(f"{name}.weight_zero_point", "is not supported; use symmetric int8 weights")
        if self._scheme.group:
            self._divisible(name, width, self._scheme.group)
            scale = self._scale(f"{name}.weight_scale", out, width // self._scheme.group)
            return (levels.float().view(out, -1, self._scheme.group) * scale[..., None]).flatten(1)
        weight = ChannelWeight(levels, self._channels(f"{name}.weight_scale", out))
        return weight if self._scheme.activations else weight.dense()

    def _channels(self, name: str, out: int) -> Tensor:
        """Return the scale of each output, [out]. The tensor has one scale for all outputs, or one for each output."""
        shape = self._files.shape_of(name)
        if shape in ([], [1]):
            return self._scale(name, *shape).reshape(1).expand(out)
        return self._scale(name, *([out] if shape == [out] else [out, 1])).flatten()

    # ---- 4 bits ------------------------------------------------------------------------------------------------

    def _grouped(self, name: str, out: int, width: int) -> Weight:
        layout, group = self._scheme.layout, self._scheme.group or width
        self._divisible(name, width, group)
        if layout == "nvfp4":
            return self._nvfp4(name, out, width, group)
        if layout == "mxfp4":
            codes = self._files.codes(f"{name}.weight_packed", torch.uint8, out, width // 2)
            return GroupedWeight(codes, E2M1, self._exponents(f"{name}.weight_scale", out, width // group))
        read = {"awq": self._awq, "gptq": self._gptq}.get(layout, self._packed)
        codes, scales, zeros, owners = read(name, out, width, width // group)
        return self._integers(codes, scales, zeros, owners, group)

    def _integers(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, owners: Tensor | None, group: int
    ) -> Weight:
        """Return the weights scale * (code - zero point). `owners` is the group of each input, or None if each group
        consists of adjacent inputs."""
        middle = 1 << self._scheme.bits - 1
        offsets = None if zeros is None else zeros.float() - middle
        if offsets is not None and not bool(offsets.any()):
            offsets = None  # symmetric: INTEGERS, the table of values, already includes the zero point
        order = None
        if owners is not None:
            order = owners.argsort(stable=True)
            codes = codes[:, order]
            every = torch.arange(scales.shape[1], device=owners.device).repeat_interleave(group)
            if not torch.equal(owners[order], every):  # groups of different sizes
                weight = codes.float() - middle - (0 if offsets is None else offsets[:, owners[order]])
                return torch.empty_like(weight).index_copy_(1, order, weight * scales[:, owners[order]])
            if torch.equal(order, torch.arange(len(order), device=order.device)):
                order = None
        if self._scheme.bits == 4:
            return GroupedWeight(packed(codes), INTEGERS, scales, offsets, order)
        weight = (codes.float() - middle).reshape(len(codes), -1, group)
        weight = ((weight if offsets is None else weight - offsets[..., None]) * scales[..., None]).flatten(1)
        return weight if order is None else torch.empty_like(weight).index_copy_(1, order, weight)

    def _awq(self, name: str, out: int, width: int, groups: int) -> Codes:
        self._divisible(name, out, 8)
        order = torch.tensor(AWQ_ORDER).argsort().tolist()

        def unpack(suffix: str, rows: int) -> Tensor:
            integers = self._files.codes(f"{name}.{suffix}", torch.int32, rows, out // 8)
            return _unpacked(integers, 4)[..., order].flatten(1).T

        return (
            unpack("qweight", width),
            self._scale(f"{name}.scales", groups, out).T,
            unpack("qzeros", groups) if self._has(f"{name}.qzeros") else None,
            None,
        )

    def _gptq(self, name: str, out: int, width: int, groups: int) -> Codes:
        bits, per = self._scheme.bits, 32 // self._scheme.bits
        self._divisible(name, width, per)
        self._divisible(name, out, per)
        codes = _unpacked(self._files.codes(f"{name}.qweight", torch.int32, width // per, out).T, bits).flatten(1)
        zeros = _unpacked(self._files.codes(f"{name}.qzeros", torch.int32, groups, out // per), bits).flatten(1).T
        zeros = zeros.int() + self._scheme.zeros_less_one & (1 << bits) - 1  # 0 is stored as the largest code
        owners = self._owners(f"{name}.g_idx", width, groups)
        return codes, self._scale(f"{name}.scales", groups, out).T, zeros, owners

    def _packed(self, name: str, out: int, width: int, groups: int) -> Codes:
        bits, per = self._scheme.bits, 32 // self._scheme.bits
        packed_width, packed_out = -(-width // per), -(-out // per)
        codes = _unpacked(self._files.codes(f"{name}.weight_packed", torch.int32, out, packed_width), bits)
        zeros = None
        if self._has(f"{name}.weight_zero_point"):
            integers = self._files.codes(f"{name}.weight_zero_point", torch.int32, packed_out, groups)
            zeros = _unpacked(integers.T, bits).flatten(1)[:, :out].T
        scales = self._scale(f"{name}.weight_scale", out, groups)
        return codes.flatten(1)[:, :width], scales, zeros, self._owners(f"{name}.weight_g_idx", width, groups)

    def _nvfp4(self, name: str, out: int, width: int, group: int) -> Weight:
        is_packed = self._has(f"{name}.weight_packed")
        codes = self._files.codes(f"{name}.weight{'_packed' if is_packed else ''}", torch.uint8, out, width // 2)
        scales = self._scale(f"{name}.weight_scale", out, width // group)
        suffix = "weight_global_scale" if self._scheme.divides else "weight_scale_2"
        whole = self._channels(f"{name}.{suffix}", 1)
        if self._scheme.divides and not bool(whole.all()):
            self._files.refuse(f"{name}.{suffix}", "is 0, but the scales must be divided by it")
        return GroupedWeight(codes, E2M1, scales / whole if self._scheme.divides else scales * whole)

    # ---- tensors -----------------------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        return self._files.dtype_of(name) is not None

    def _scale(self, name: str, *shape: int) -> Tensor:
        dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu
        scale = self._files.codes(name, dtypes, *shape).float()
        if not bool(scale.isfinite().all()):
            self._files.refuse(name, "has a scale that is NaN or infinite; download the model again")
        return scale

    def _exponents(self, name: str, *shape: int) -> Tensor:
        """Return scales that are stored as exponents of 2, with a bias of 127."""
        stored = self._files.codes(name, (torch.uint8, torch.float8_e8m0fnu), *shape).view(torch.uint8)
        if bool((stored == 255).any()):
            self._files.refuse(name, "has a scale that is NaN or infinite; download the model again")
        return torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.int() - 127)

    def _owners(self, name: str, width: int, groups: int) -> Tensor | None:
        """Return the group of each input, or None if the tensor is missing."""
        if not self._has(name):
            return None
        owners = self._files.codes(name, (torch.int32, torch.int64), width).long()
        if not bool(((owners >= 0) & (owners < groups)).all()):
            self._files.refuse(name, f"has a number that is not the index of a group (0 to {groups - 1})")
        return owners

    def _divisible(self, name: str, size: int, by: int) -> None:
        if size % by:
            self._files.refuse(name, f"has a dimension of {size}, but its format requires a multiple of {by}")


def _spread(scales: Tensor, high: int, wide: int, out: int, width: int) -> Tensor:
    """Expand `scales`, one per block of `high` x `wide` weights, to one scale per weight, [out, width]."""
    return scales.repeat_interleave(high, 0)[:out].repeat_interleave(wide, 1)[:, :width]


def _unpacked(integers: Tensor, bits: int) -> Tensor:
    """Return the codes in each int32, low bits first, uint8 [..., 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=integers.device, dtype=torch.int32)
    return (integers[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)
