"""A run of tokens against one state, without a step of the state between them.

With P_i the decays up to token i multiplied, and D(j, i) those after j up to i, token i reads S_i = S P_i + sum over j < i of
delta_j (k_j D(j, i))^T. So its products with the state are products of the first state, S (P_i k_i), and scalars that tokens
have among each other, (k_j D(j, i)) . k_i. No exponent is positive, no sum cancels: each D is a product of decays.
"""

import triton
import triton.language as tl

from optimized.kda_cell import dot_rows


@triton.jit
def masked(values, count, other, COUNT: tl.constexpr):
    """The first `count` of a run of vectors, `other` in the place of the rest."""
    kept = ()
    for i in tl.static_range(COUNT):
        kept += (tl.where(i < count, values[i], other),)  # type: ignore[assignment]
    return kept


@triton.constexpr_function
def stacked_to(count):
    """The power of two that a stack of `count` is padded to."""
    return 1 << (count - 1).bit_length()


@triton.jit
def stacked(values, COUNT: tl.constexpr):
    """Two to 8 vectors [N] side by side, [N, `stacked_to`], in the order of `unstacked`; the last one fills up."""
    LAST: tl.constexpr = COUNT - 1
    N: tl.constexpr = values[0].shape[0]
    both = tl.join(values[0], values[1])
    if COUNT > 2:
        both = tl.join(both, tl.join(values[2], values[min(3, LAST)]))
    if COUNT > 4:
        late = tl.join(tl.join(values[4], values[min(5, LAST)]), tl.join(values[min(6, LAST)], values[min(7, LAST)]))
        both = tl.join(both, late)
    return tl.reshape(both, [N, stacked_to(COUNT)])


@triton.jit
def _pair(x):
    """The two halves of the last axis of x [M, N, 2]."""
    a, b = tl.split(x)
    return (a, b)


@triton.jit
def _four(x, M: tl.constexpr, N: tl.constexpr):
    a, b = tl.split(tl.reshape(x, [M, N, 2, 2]))
    return _pair(a) + _pair(b)


@triton.jit
def unstacked(x, COUNT: tl.constexpr):
    """What was stacked in the last axis of x [M, N, `stacked_to`]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if COUNT == 2:
        values = _pair(x)
    elif COUNT <= 4:
        values = _four(x, M, N)
    else:
        a, b = tl.split(tl.reshape(x, [M, N, 4, 2]))
        values = _four(a, M, N) + _four(b, M, N)
    return values


@triton.jit
def _sums(a, b, c, d):
    """The sums of four vectors, in one reduction."""
    both = tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0)
    left, right = tl.split(both)
    a_sum, b_sum = tl.split(left)
    c_sum, d_sum = tl.split(right)
    return a_sum, b_sum, c_sum, d_sum


@triton.jit
def _all_sums(products, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(0, COUNT, 4):
        sums = _sums(products[i], products[min(i + 1, COUNT - 1)], products[min(i + 2, COUNT - 1)], products[min(i + 3, COUNT - 1)])
        for j in tl.static_range(min(4, COUNT - i)):
            out += (sums[j],)  # type: ignore[assignment]
    return out


@triton.jit
def chained(keys, queries, decays, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """What a run of COUNT tokens needs beside the state; the queries are those of the tokens from FIRST on.

    reads P_i k_i; queries P_i q_i; among: (k_j D(j, i)) . k_i for j < i, row by row; across: the same with q_i, for j <= i;
    golden: the keys up to token FIRST as they stand after it, k_j D(j, FIRST), and P_FIRST.
    """
    reads, asked, among, across = (), (), (), ()
    carried, golden = (), ()
    total = decays[0]
    golden_decay = total
    for i in tl.static_range(COUNT):
        if i > 0:
            total = total * decays[i]
        before = carried
        carried = ()
        for j in tl.static_range(i):
            carried += (before[j] * decays[i],)  # type: ignore[assignment]
        products = ()
        for j in tl.static_range(i):
            products += (carried[j] * keys[i],)  # type: ignore[assignment]
        carried += (keys[i],)  # type: ignore[assignment]
        reads += (total * keys[i],)  # type: ignore[assignment]
        if i >= FIRST:
            asked += (total * queries[i - FIRST],)  # type: ignore[assignment]
            for j in tl.static_range(i + 1):
                products += (carried[j] * queries[i - FIRST],)  # type: ignore[assignment]
        if i == FIRST:
            golden = carried
            golden_decay = total
        if i > 0 or FIRST == 0:
            sums = _all_sums(products, i + (i + 1 if i >= FIRST else 0))
            for j in tl.static_range(i):
                among += (sums[j],)  # type: ignore[assignment]
            if i >= FIRST:
                for j in tl.static_range(i + 1):
                    across += (sums[i + j],)  # type: ignore[assignment]
    return reads, asked, among, across, golden, golden_decay


@triton.jit
def rows_times(s, vectors, CHUNKS: tl.constexpr, KI: tl.constexpr, COUNT: tl.constexpr):
    """Each row of s [BV, CHUNKS, KI] times each vector."""
    out = ()
    for i in tl.static_range(COUNT):
        out += (dot_rows(s, tl.reshape(vectors[i], [CHUNKS, KI])),)  # type: ignore[assignment]
    return out


@triton.jit
def rows_after(s, keys, decay, deltas, CHUNKS: tl.constexpr, KI: tl.constexpr, COUNT: tl.constexpr):
    """The rows after the first COUNT tokens of a run, from their keys as they stand there."""
    s = s * tl.reshape(decay, [CHUNKS, KI])[None, :, :]
    for i in tl.static_range(COUNT):
        s += deltas[i][:, None, None] * tl.reshape(keys[i], [CHUNKS, KI])[None, :, :]
    return s
