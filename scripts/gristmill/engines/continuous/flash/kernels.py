"""Attention over sequences of uneven lengths (torch's flash kernels) and over a paged cache (Triton).

Names and arguments are those of flash-attention 3, as far as transformers uses them in inference. Causal masks are
aligned to the end: the last query sees every key.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Keys a step of the paged kernel; divides every page size that is a multiple of it.
KEYS_A_STEP = 64
#: Programs that fill a GPU; below that the keys of a sequence are split among several.
ENOUGH_PROGRAMS, MOST_SPLITS = 512, 16
LOG2_E = 1.4426950408889634


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attention of sequences of one length: q (B, Tq, H, D), k and v (B, Tk, Hkv, D) to (B, Tq, H, D)."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
    q_flat, k_flat, v_flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    cuts = (starts * queries, starts * keys, queries, keys)
    out = flash_attn_varlen_func(q_flat, k_flat, v_flat, *cuts, softmax_scale, causal, window_size)
    return out.view(q.shape)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attention of sequences laid end to end: q (Tq, H, D), k and v (Tk, Hkv, D) to (Tq, H, D).

    Args:
        q: queries of all sequences.
        k: keys.
        v: values.
        cu_seqlens_q: (N + 1,), int32, where each sequence's queries begin.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: the longest sequence's queries, or more.
        max_seqlen_k: the longest sequence's keys, or more.
        softmax_scale: 1 / sqrt(D) by default.
        causal: whether a query sees only keys up to its own place.
        window_size: keys left and right of its place that a query sees; -1: all.
    """
    left, right = (window_size[0], 0) if causal else window_size
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal and left < 0, False,
        scale=softmax_scale,
        window_size_left=None if left < 0 else left,
        window_size_right=None if left < 0 or right < 0 else right,
    )  # fmt: skip
    result: torch.Tensor = out[0]
    return result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """One new token a sequence: its key and value are written into the paged cache, and it looks at all of them.

    Args:
        q: (B, 1, H, D).
        k_cache: (pages, page size, Hkv, D), changed in place; so is v_cache.
        v_cache: like k_cache.
        k: (B, 1, Hkv, D), the new keys.
        v: (B, 1, Hkv, D), the new values.
        cache_seqlens: (B,), tokens before the new one; negative for a place that is padding.
        block_table: (B, pages a sequence), int32, the pages of each sequence in order.
        softmax_scale: 1 / sqrt(D) by default.
        causal: always so for one token.
        window_size: keys left of its place that a query sees; -1: all.

    Returns:
        (B, 1, H, D).
    """
    pages, page_size = k_cache.shape[:2]
    real = cache_seqlens >= 0
    place = cache_seqlens.clamp(min=0).long()
    page = block_table.gather(1, (place // page_size).unsqueeze(1)).squeeze(1).long()
    page = torch.where(real & (page >= 0), page, pages - 1)  # the last page takes what belongs nowhere
    k_cache[page, place % page_size] = k[:, 0]
    v_cache[page, place % page_size] = v[:, 0]
    lengths = torch.where(real, cache_seqlens + 1, 0).to(torch.int32)
    return paged_decode(q[:, 0], k_cache, v_cache, block_table, lengths, softmax_scale, window_size[0]).unsqueeze(1)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None,
    window_left: int,
) -> torch.Tensor:
    """Attention of one query a sequence, q (B, H, D), over the first `lengths` (B,) tokens of its pages; (B, H, D).

    The keys of a sequence are read once for all query heads that share them, and split among programs when there are
    too few sequences to fill the GPU; the parts are joined by their log-sum-exp (flash decoding, Dao et al. 2023).
    """
    batch, heads, size = q.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if page_size % KEYS_A_STEP:
        raise ValueError(f"page size {page_size} is no multiple of {KEYS_A_STEP}")
    splits = max(1, min(MOST_SPLITS, ENOUGH_PROGRAMS // (batch * kv_heads)))
    q = q.contiguous()
    out = torch.empty_like(q)
    parts = torch.empty((splits, batch, heads, size), dtype=torch.float32, device=q.device) if splits > 1 else out
    sums = torch.empty((splits, batch, heads), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    block_size = triton.next_power_of_2(size)
    _paged_decode_kernel[(batch, kv_heads, splits)](
        q, k_cache, v_cache, block_table, lengths, parts, sums,
        (size**-0.5 if scale is None else scale) * LOG2_E,
        block_table.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        HEADS=heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), SIZE=size, BLOCK_SIZE=block_size,
        PAGE=page_size, STEP=KEYS_A_STEP, SPLITS=splits, WINDOW=window_left,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(batch, heads)](
            parts, sums, out, batch * heads, SIZE=size, BLOCK_SIZE=block_size, SPLITS=splits, num_warps=1
        )
    return out


@triton.jit
def _paged_decode_kernel(
    q, k_cache, v_cache, block_table, lengths, out, sums, scale,
    table_stride, page_stride, token_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program: a sequence, a key-value head, and one of SPLITS runs of its keys."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    heads = kv_head * GROUP + tl.arange(0, ROWS)
    wanted = tl.arange(0, ROWS) < GROUP
    dims = tl.arange(0, BLOCK_SIZE)
    inside = dims < SIZE
    places = row * HEADS + heads
    both = wanted[:, None] & inside[None, :]
    query = tl.load(q + places[:, None] * SIZE + dims[None, :], mask=both, other=0.0)
    first = 0
    if WINDOW >= 0:
        first = tl.maximum(length - 1 - WINDOW, 0)
    first_step = first // STEP
    steps = tl.cdiv(length, STEP) - first_step
    share = tl.cdiv(steps, SPLITS)
    begin = first_step + split * share
    end = tl.minimum(begin + share, first_step + steps)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BLOCK_SIZE], tl.float32)
    for step in range(begin, end):
        start = step * STEP
        keys = start + tl.arange(0, STEP)
        page = tl.load(block_table + row * table_stride + start // PAGE).to(tl.int64)
        tokens = page * page_stride + (start % PAGE + tl.arange(0, STEP)) * token_stride + kv_head * head_stride
        seen = keys < length
        if WINDOW >= 0:
            seen = seen & (keys >= first)
        key = tl.load(k_cache + tokens[:, None] + dims[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        value = tl.load(v_cache + tokens[:, None] + dims[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key)) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - now_highest)
        weights = tl.exp2(scores - now_highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        highest = now_highest
    result = tl.where(total[:, None] > 0, result / total[:, None], 0.0)
    part = split * tl.num_programs(0) * HEADS
    tl.store(out + (part + places)[:, None] * SIZE + dims[None, :], result.to(out.dtype.element_ty), mask=both)
    tl.store(sums + part + places, tl.where(total > 0, highest + tl.log2(total), -float("inf")), mask=wanted)


@triton.jit
def _join_kernel(parts, sums, out, part_stride, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """One program: the parts of one sequence's head, weighted by their sums (base 2)."""
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, BLOCK_SIZE)
    inside = dims < SIZE
    highest = -float("inf")
    for part in range(SPLITS):
        highest = tl.maximum(highest, tl.load(sums + part * part_stride + place))
    total = 0.0
    result = tl.zeros([BLOCK_SIZE], tl.float32)
    for part in range(SPLITS):
        here = tl.load(sums + part * part_stride + place)
        weight = tl.where(here > -float("inf"), tl.exp2(here - highest), 0.0)
        values = tl.load(parts + (part * part_stride + place) * SIZE + dims, mask=inside, other=0.0)
        result += weight * values
        total += weight
    result = tl.where(total > 0, result / total, 0.0)
    tl.store(out + place * SIZE + dims, result.to(out.dtype.element_ty), mask=inside)


def reference_paged_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, lengths: Any, scale: float
) -> torch.Tensor:
    """`paged_decode` in float64, one sequence at a time: what the kernel is tested against."""
    page_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    rows = []
    for row, length in enumerate(lengths.tolist()):
        pages = block_table[row, : -(-length // page_size)].long()
        key, value = (cache[pages].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
        key, value = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))  # (H, T, D)
        weights = torch.softmax(torch.einsum("hd,htd->ht", q[row].double(), key) * scale, dim=-1)
        rows.append(torch.einsum("ht,htd->hd", weights, value))
    return torch.stack(rows)
