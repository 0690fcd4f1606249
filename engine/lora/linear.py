"""Applies LoRA adapters to a decoder (Hu et al., 2021). One batch may contain requests with different adapters.

As in Punica and S-LoRA (2023), the base model's matrix multiplies all rows, and each adapter adds its low-rank update
to the rows of its requests. A row's result does not depend on the other rows.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels import StepKernels
from engine.linear import Linear, LinearFormat
from engine.lora.files import AdapterFiles, LowRank, lora_digest, read_lora
from engine.models.decoder import AttentionDecoderLayer, Decoder, DecoderLayer
from engine.models.families import FAMILIES
from engine.models.load import qkv_rows
from engine.models.mlp import MLP_ROWS, Mlp
from engine.models.spec import AttentionSpec, MlpSpec


@dataclass(slots=True)
class AdaptedRows:
    """The rows that each adapter changes in the current pass. The rows are listed twice: as indices of tokens, and as
    indices of logit rows."""

    tokens: dict[str, Tensor] = field(default_factory=dict)  # digest of an adapter -> row numbers, int64
    logit_rows: dict[str, Tensor] = field(default_factory=dict)
    begin: int | None = None  # set while an MLP multiplies only a part of the rows: index of the part's first row

    def select(self, batch: Batch, device: torch.device) -> None:
        """Set the rows for a pass over `batch` on `device`."""
        self.tokens, self.logit_rows, self.begin = {}, {}, None  # a pass that failed may have left another `begin`
        if not batch.adapters:
            return
        names = sorted({name for name in batch.adapters if name})
        numbers = torch.tensor([names.index(name) if name else -1 for name in batch.adapters])
        owners = numbers.repeat_interleave(torch.tensor(batch.counts))
        for kept, owner in ((self.tokens, owners), (self.logit_rows, owners[batch.logit_rows.cpu()])):
            kept |= {
                name: (owner == number).nonzero().flatten().to(device, non_blocking=True)
                for number, name in enumerate(names)
            }


@dataclass(slots=True)
class AdaptedLinear(Linear):
    """A matrix of the model and its updates. In the last layer, some matrices multiply only the logit rows."""

    base: Linear
    updates: dict[str, tuple[Linear, Linear]]  # digest of an adapter -> its update, as two matrices: down and up
    rows: AdaptedRows
    takes_logit_rows: bool = False

    def __call__(self, rows: Tensor) -> Tensor:
        result, begin = self.base(rows), self.rows.begin
        for name, index in (self.rows.logit_rows if self.takes_logit_rows else self.rows.tokens).items():
            if (update := self.updates.get(name)) is None:
                continue
            mine = index  # a mask would make the host wait for a GPU
            if begin is not None:
                mine = index[(index >= begin) & (index < begin + len(rows))] - begin
            if len(mine):
                down, up = update
                result.index_add_(0, mine, up(down(rows[mine].contiguous())).to(result.dtype))
        return result


@dataclass(slots=True)
class AdaptedMlp(Mlp):
    """An MLP in which at least one matrix is adapted."""

    rows: AdaptedRows

    def __call__(self, rows: Tensor, kernels: StepKernels) -> Tensor:
        if len(rows) <= MLP_ROWS or rows.device.type != "cpu":
            return self.down(kernels.gated(self.gate_up(rows), self.activation))
        for begin in range(0, len(rows), MLP_ROWS):
            self.rows.begin, some = begin, rows[begin : begin + MLP_ROWS]
            some.copy_(self.down(kernels.gated(self.gate_up(some), self.activation)))
        self.rows.begin = None
        return rows


@dataclass(slots=True)
class ModelAdapters:
    """The adapters of a model, with ranks up to `max_rank`.

    Adapters may be added and removed between two steps, on the thread that runs the steps.
    """

    model: Decoder
    linear: LinearFormat
    max_rank: int = 64
    rows: AdaptedRows = field(default_factory=AdaptedRows)
    matrices: list[AdaptedLinear] = field(default_factory=list)

    def read(self, directory: Path) -> AdapterFiles:
        """Read an adapter, on any thread. Raises ValueError or OSError if it cannot be served."""
        return AdapterFiles(lora_digest(directory), directory, read_lora(directory, self.max_rank))

    def add(self, files: AdapterFiles) -> None:
        """Add an adapter to the model.

        Matrices of attention and of MLPs are adapted. Raises ValueError, which names the module, if the adapter updates
        another module: experts, latent attention, recurrent layers, embeddings or the output head.
        """
        adapter = _Adapter(self, files.digest, dict(files.updates))
        try:
            for index in range(len(self.model.layers)):
                adapter.update_layer(index)
            if adapter.left:
                raise ValueError(
                    f"{files.directory}: module {min(adapter.left)[:120]} of the adapter is not a matrix of attention "
                    f"or of an MLP of {self.model.config.architecture}, so it cannot be adapted"
                )
        except ValueError:
            self.remove(files.digest)
            raise

    def remove(self, digest: str) -> None:
        """Remove the adapter. No request may use it any more."""
        for matrix in self.matrices:
            matrix.updates.pop(digest, None)


@dataclass(slots=True)
class _Adapter:
    """Adds one adapter to the layers of a model. `left` has the updates that no matrix has taken yet."""

    owner: ModelAdapters
    digest: str
    left: dict[str, LowRank]

    def update_layer(self, index: int) -> None:
        layer, spec = self.owner.model.layers[index], self.owner.model.config.layers[index]
        names, prefix = FAMILIES[self.owner.model.config.architecture].weights, f"model.layers.{index}."
        is_last = index == len(self.owner.model.layers) - 1
        if isinstance(spec.mixer, AttentionSpec) and isinstance(layer, AttentionDecoderLayer):
            self._update_attention(layer, spec.mixer, prefix, names.qkv, names.output, is_last)
        if isinstance(spec.mlp, MlpSpec) and isinstance(layer.mlp, Mlp):
            self._update_mlp(layer, spec.mlp, f"{prefix}{names.mlp}.", names.gate_up, names.down, is_last)

    def _update_attention(
        self,
        layer: AttentionDecoderLayer,
        spec: AttentionSpec,
        prefix: str,
        qkv: tuple[str, ...],
        output: str,
        is_last: bool,
    ) -> None:
        hidden, made = self.owner.model.config.hidden_size, qkv_rows(spec, qkv)
        update = self._joined([prefix + name for name in made.names], made.sizes, hidden)
        if update is not None:
            layer.qkv = self._adapted(layer.qkv, update, made.order, False)
            if layer.gate is not None:
                layer.gate = self._adapted(layer.gate, update, made.gates, False)
        update = self._joined([prefix + output], [hidden], spec.heads * spec.head_dim)
        if update is not None:
            layer.output = self._adapted(layer.output, update, None, is_last)

    def _update_mlp(
        self, layer: DecoderLayer, spec: MlpSpec, prefix: str, gate_up: tuple[str, ...], down: str, is_last: bool
    ) -> None:
        assert isinstance(layer.mlp, Mlp)
        hidden, old = self.owner.model.config.hidden_size, layer.mlp
        mlp = old if isinstance(old, AdaptedMlp) else AdaptedMlp(old.gate_up, old.down, old.activation, self.owner.rows)
        sizes = [2 * spec.inner // len(gate_up)] * len(gate_up)
        update = self._joined([prefix + name for name in gate_up], sizes, hidden)
        if update is not None:
            layer.mlp, mlp.gate_up = mlp, self._adapted(mlp.gate_up, update, None, is_last)
        update = self._joined([prefix + down], [hidden], spec.inner)
        if update is not None:
            layer.mlp, mlp.down = mlp, self._adapted(mlp.down, update, None, is_last)

    def _joined(self, names: list[str], sizes: list[int], width: int) -> LowRank | None:
        """Return one update for the matrix that joins these modules, or None if the adapter changes none of them."""
        parts = [self.left.pop(name, None) for name in names]
        for name, part, size in zip(names, parts, sizes, strict=True):
            found = (size, width) if part is None else (part.up.shape[0], part.down.shape[1])
            if found != (size, width):
                raise ValueError(
                    f"the adapter's update of {name} is for a matrix of {found[0]} x {found[1]}, and the model's is "
                    f"{size} x {width}: the adapter belongs to another model"
                )
        if not any(parts):
            return None
        ups = [part.up if part else torch.zeros(size, 0) for part, size in zip(parts, sizes, strict=True)]
        return LowRank(torch.cat([part.down for part in parts if part]), torch.block_diag(*ups))  # type: ignore[no-untyped-call]

    def _adapted(self, base: Linear, update: LowRank, order: Tensor | None, is_last: bool) -> AdaptedLinear:
        adapted = base if isinstance(base, AdaptedLinear) else AdaptedLinear(base, {}, self.owner.rows, is_last)
        if adapted is not base:
            self.owner.matrices.append(adapted)
        model, up = self.owner.model, update.up if order is None else update.up[order]
        adapted.updates[self.digest] = (
            self.owner.linear.make_exact(update.down.to(model.device, model.dtype).contiguous(), None),
            self.owner.linear.make_exact(up.to(model.device, model.dtype).contiguous(), None),
        )
        return adapted
