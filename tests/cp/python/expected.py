"""What attention and its gradients are, in float64 by numpy from the formulas, and how far f32 may
be from that.

The bound is elementwise and to first order in u = 2^-24, for any order of the sums. With
g(n) = n u, z = |softmax_scale|, sums over what a row sees, and e = 2e-7 the error of a power of two
(docs/numerics.md section 5; a weight passes at most R = 2 + log2(n) of them):

    A_ij   = sum_d |q_id k_jd|                       a logit errs by z g(D+2) A_ij
    r_ij   = z g(D+2) max_j A_ij + u (|s_ij| + |m_i|) + R e     relative error of a weight
    B_i    = max_j r_ij + g(n)                       relative error of their sum
    out    : 2 B_i max_j |v_jd| + u |out|            the weights' errors, in sum and in quotient
    lse    : B_i + u |lse|
    p_ij   : relative, r_ij + lse's bound + u |lse|  p = exp(s - lse)
    dp_ij  = dout.v : g(Dv) sum_d |dout v|
    delta_i: g(Dv+1) sum_d |dout out| + sum_d |dout| bound(out) + u |dlse|
    ds_ij  = p (dp - delta): |ds| (bound(p) + 2 u) + p (bound(dp) + bound(delta))
    dq     : z (sum_j bound(ds) |k| + g(n+2) sum_j |ds k|);  dk alike;
    dv     : sum_i p bound(p) |dout| + g(n+2) sum_i p |dout|

Weights stored as bf16 on the way (the bf16 dot instruction) add 2^-8 to the relative error of p and
of ds, and a result stored in another type adds half that type's epsilon.
"""

from typing import NamedTuple, Optional

import numpy

U = 2.0**-24
EXP = 2e-7
HALF_EPSILON = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Result(NamedTuple):
    """Values, or their bounds."""

    out: numpy.ndarray
    lse: numpy.ndarray
    dq: Optional[numpy.ndarray] = None
    dk: Optional[numpy.ndarray] = None
    dv: Optional[numpy.ndarray] = None


def visible(cu_q, cu_kv, causal):
    """[tq, tk]: which keys a query sees."""
    seen = numpy.zeros((cu_q[-1], cu_kv[-1]), bool)
    for d in range(len(cu_q) - 1):
        tq, tk = cu_q[d + 1] - cu_q[d], cu_kv[d + 1] - cu_kv[d]
        block = numpy.ones((tq, tk), bool)
        if causal:
            block = numpy.tri(tq, tk, tk - tq, dtype=bool)
        seen[cu_q[d] : cu_q[d + 1], cu_kv[d] : cu_kv[d + 1]] = block
    return seen


def attention(
    q, k, v, cu_q, *, cu_kv=None, causal=True, scale=None, dout=None, dlse=None, dtype="float32"
):
    """(values, bounds), each a Result; gradients when dout is given."""
    cu_kv = cu_q if cu_kv is None else cu_kv
    group = q.shape[1] // k.shape[1]
    q = numpy.moveaxis(numpy.asarray(q, numpy.float64), 1, 0)
    k, v = (
        numpy.repeat(numpy.moveaxis(numpy.asarray(x, numpy.float64), 1, 0), group, 0)
        for x in (k, v)
    )
    depth, value_depth, keys, rows = q.shape[2], v.shape[2], k.shape[1], q.shape[1]
    scale = depth**-0.5 if scale is None else scale
    seen = visible(cu_q, cu_kv, causal)
    transpose = numpy.transpose
    with numpy.errstate(invalid="ignore", divide="ignore"):
        s = numpy.where(seen, scale * q @ transpose(k, (0, 2, 1)), -numpy.inf)
        m = numpy.where(seen.any(1), s.max(2), 0.0)[..., None]
        weights = numpy.where(seen, numpy.exp(s - m), 0.0)
        total = weights.sum(2, keepdims=True)
        lse = numpy.log(total) + m
        p = numpy.where(total > 0, weights / total, 0.0)
    out = p @ v
    finite_s = numpy.where(seen, s, 0.0)
    finite_lse = numpy.where(numpy.isfinite(lse), lse, 0.0)

    # Bounds.
    narrow = 2.0**-8 if dtype == "bfloat16" else 0.0
    size = numpy.where(seen, numpy.abs(q) @ transpose(numpy.abs(k), (0, 2, 1)), 0.0)
    r = abs(scale) * (depth + 2) * U * size.max(2, keepdims=True)
    r = r + U * (numpy.abs(finite_s) + numpy.abs(m)) + (2 + numpy.log2(keys + 1)) * EXP
    b = r.max(2, keepdims=True) + keys * U + narrow
    max_v = numpy.stack(
        [numpy.abs(v)[:, row].max(1) if row.any() else 0 * v[:, 0] for row in seen], 1
    )
    half = HALF_EPSILON[dtype]
    out_bound = 2 * b * max_v + (U + half) * numpy.abs(out)
    lse_bound = b + U * numpy.abs(finite_lse)

    def back(x):
        return numpy.moveaxis(x, 0, 1)

    if dout is None:
        return Result(back(out), back(lse)[..., 0]), Result(
            back(out_bound), back(lse_bound)[..., 0]
        )

    dout = numpy.moveaxis(numpy.asarray(dout, numpy.float64), 1, 0)
    dlse = numpy.zeros(lse.shape) if dlse is None else numpy.asarray(dlse, float).T[..., None]
    dp = dout @ transpose(v, (0, 2, 1))
    delta = (dout * out).sum(2, keepdims=True) - dlse
    ds = p * (dp - delta)
    dq, dk, dv = (
        scale * ds @ k,
        scale * transpose(ds, (0, 2, 1)) @ q,
        transpose(p, (0, 2, 1)) @ dout,
    )

    p_bound = r + lse_bound + U * numpy.abs(finite_lse) + narrow
    dp_bound = (value_depth * U + narrow) * (numpy.abs(dout) @ transpose(numpy.abs(v), (0, 2, 1)))
    delta_bound = (value_depth + 1) * U * numpy.abs(dout * out).sum(2, keepdims=True)
    delta_bound = delta_bound + (numpy.abs(dout) * out_bound).sum(2, keepdims=True)
    delta_bound = delta_bound + U * numpy.abs(dlse)
    ds_bound = numpy.abs(ds) * (p_bound + 2 * U + narrow) + p * (dp_bound + delta_bound)
    dq_bound = abs(scale) * (ds_bound + (keys + 2) * U * numpy.abs(ds)) @ numpy.abs(k)
    ds_sum = transpose(ds_bound + (rows * group + 2) * U * numpy.abs(ds), (0, 2, 1))
    dk_bound = abs(scale) * ds_sum @ numpy.abs(q)
    dv_bound = transpose(p * (p_bound + (rows * group + 2) * U), (0, 2, 1)) @ numpy.abs(dout)

    def over_group(x):
        return back(x.reshape(-1, group, *x.shape[1:]).sum(1))

    values = (back(dq), over_group(dk), over_group(dv))
    bounds = (back(dq_bound), over_group(dk_bound), over_group(dv_bound))
    bounds = tuple(bound + half * numpy.abs(value) for bound, value in zip(bounds, values))
    return (
        Result(back(out), back(lse)[..., 0], *values),
        Result(back(out_bound), back(lse_bound)[..., 0], *bounds),
    )


def assert_within(test, name, computed, expected, bound):
    """Every element within its bound; infinities equal."""
    computed = numpy.asarray(computed, numpy.float64)
    test.assertEqual(computed.shape, expected.shape, name)
    finite = numpy.isfinite(expected)
    numpy.testing.assert_array_equal(computed[~finite], expected[~finite], name)
    excess = numpy.abs(computed - numpy.where(finite, expected, 0.0)) - bound
    worst = numpy.where(finite, excess, -numpy.inf).max(initial=-numpy.inf)
    test.assertFalse(worst > 0, f"{name}: an element exceeds its bound by {worst:.3g}")
    test.assertTrue(numpy.isfinite(computed[finite]).all(), f"{name}: not finite")
