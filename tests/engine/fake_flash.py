"""Fakes of the flash-attn packages in plain torch. Tests write them as packages to a directory on sys.path.

The fakes follow the docstrings of FlashAttention 2.8, of its `hopper/` folder (version 3) and of `flash_attn.cute`
(version 4). The fakes reject the same inputs as the packages: index tensors of a wrong dtype, page sizes that are not a
multiple of 256 (version 2), an unpadded block table, and tensors that are not contiguous in the last dimension.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAILURES = ["ImportError", "OSError", "AttributeError", "RuntimeError"]  # errors of packages built for another torch
FUNCTIONS = {
    "flash_attn": "varlen_2 as flash_attn_varlen_func, with_cache_2 as flash_attn_with_kvcache",
    "flash_attn_interface": "with_cache_3 as flash_attn_with_kvcache",
    "flash_attn.cute": "varlen_4 as flash_attn_varlen_func",
}


OLD_CUTE = "def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, **more): ..."  # in FlashAttention 2.8.3


def write_package(root: Path, name: str, failure: str = "") -> None:
    """Write the package `name` below `root`.

    If `failure` is in FAILURES, an import of the package creates the file `root`/imported and raises this exception.
    Any other text in `failure` is the code of the package."""
    directory = root.joinpath(*name.split("."))
    directory.mkdir(parents=True, exist_ok=True)
    code = f"from tests.engine.fake_flash import {FUNCTIONS[name]}\n"
    if failure and failure not in FAILURES:
        code = failure
    elif failure:
        code = f"open({str(root / 'imported')!r}, 'w').close()\nraise {failure}('undefined symbol\\nadvice in more lines')\n"
    (directory / "__init__.py").write_text(code)


def _attend(q: Tensor, k: Tensor, v: Tensor, left: int | None) -> Tensor:
    """Return causal attention. `q` [queries, heads, D] is for the last tokens of `k` and `v` [context, kv_heads, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (half.repeat_interleave(group, dim=1).double() for half in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    at = torch.arange(len(k))[None] - (torch.arange(len(q))[:, None] + len(k) - len(q))
    seen = (at <= 0) if left is None else (at <= 0) & (at >= -left)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).nan_to_num()  # 0 if no key is visible
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def _check(q: Tensor, pages: tuple[Tensor, Tensor], ints: list[Tensor], multiple: int) -> None:
    assert q.dtype in {torch.float16, torch.bfloat16}
    for half in pages:
        assert half.dim() == 4
        assert half.dtype == q.dtype
        assert half.stride(-1) == 1
        assert half.shape[1] % multiple == 0, "Paged KV cache block size must be divisible by 256"
        assert half.shape[3] == q.shape[-1]
    for one in ints:
        assert one.dtype == torch.int32
        assert one.stride(-1) == 1


def _paged(q: Tensor, pages: tuple[Tensor, Tensor], cu_q: Tensor, lengths: Tensor, table: Tensor, left: Any) -> Tensor:
    assert len(cu_q) == len(lengths) + 1 == len(table) + 1
    assert int(cu_q[0]) == 0
    assert int(cu_q[-1]) == len(q)
    size, out = pages[0].shape[1], torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        start, end = int(cu_q[row]), int(cu_q[row + 1])
        ids = table[row, : -(-length // size)].long()
        k, v = (half[ids].flatten(0, 1)[:length] for half in pages)
        if length:
            out[start:end] = _attend(q[start:end], k, v, left)
    return out


def _left(window: tuple[int | None, int | None]) -> int | None:
    left, right = window
    if left in {-1, None}:
        assert right in {-1, None}
        return None
    assert right == 0
    return left


def varlen_2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool, window_size: tuple[int, int], block_table: Tensor,
) -> Tensor:  # fmt: skip
    _check(q, (k, v), [cu_seqlens_q, cu_seqlens_k, block_table], 256)
    lengths = cu_seqlens_k.diff()
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(lengths.max())
    return _paged(q, (k, v), cu_seqlens_q, lengths, block_table, _left(window_size))


def with_cache_2(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool,
    window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert causal
    assert q.dim() == 4
    assert len(q) == len(cache_seqlens)
    _check(q, (k_cache, v_cache), [cache_seqlens, block_table], 256)
    cu_q = torch.arange(0, len(q) * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
    pages = (k_cache, v_cache)
    return _paged(q.flatten(0, 1), pages, cu_q, cache_seqlens, block_table, _left(window_size)).view_as(q)


def with_cache_3(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    _check(q, (k_cache, v_cache), [cache_seqlens, page_table, cu_seqlens_q], 1)
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return _paged(q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table, _left(window_size))


def varlen_4(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_k: Tensor, page_table: Tensor, causal: bool, window_size: tuple[int | None, int | None],
) -> tuple[Tensor, None]:  # fmt: skip
    _check(q, (k, v), [cu_seqlens_q, seqused_k, page_table], 1)
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    assert window_size[0] != -1, "None means no window here"
    return _paged(q, (k, v), cu_seqlens_q, seqused_k, page_table, _left(window_size)), None
