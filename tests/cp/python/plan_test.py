"""Forward and backward on numpy arrays: accuracy, strides, no copies, refusals. One rank."""

import threading
import unittest

import expected
import numpy

import cpattn

SEED = 20240611


def inputs(tq, tk=None, heads=4, kv_heads=2, dim=24, value_dim=None, dtype="float32", seed=SEED):
    """q, k, v, dout, dlse."""
    random = numpy.random.default_rng(seed)
    tk = tq if tk is None else tk
    value_dim = dim if value_dim is None else value_dim
    shapes = [
        (tq, heads, dim),
        (tk, kv_heads, dim),
        (tk, kv_heads, value_dim),
        (tq, heads, value_dim),
    ]
    arrays = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    return (*arrays, random.standard_normal((tq, heads)).astype("float32"))


def plan_of(q, k, v, *, causal=True, cu=None, cu_kv=None, chunk_tokens=16, isa=None, **problem):
    attention = cpattn.Attention(
        cpattn.self_group(), causal=causal, chunk_tokens=chunk_tokens, isa=isa
    )
    lengths = {"cu_seqlens": (0, len(q)) if cu is None else cu, "cu_seqlens_kv": cu_kv}
    return attention.plan(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        dtype=q.dtype,
        **lengths,
        **problem,
    )


CASES = {
    "causal": dict(tq=75),
    "full": dict(tq=75, causal=False),
    "documents": dict(tq=75, cu=(0, 20, 20, 21, 75)),
    "more keys": dict(tq=40, tk=75, cu=(0, 10, 40), cu_kv=(0, 30, 75)),
    "rows without keys": dict(tq=40, tk=20, cu=(0, 30, 40), cu_kv=(0, 10, 20)),
    "one kv head": dict(tq=33, heads=6, kv_heads=1, dim=8, value_dim=40),
    "scale": dict(tq=50, scale=-0.3),
    "float16": dict(tq=50, dtype="float16"),
}


class Accuracy(unittest.TestCase):
    def check(self, tq, tk=None, cu=None, cu_kv=None, causal=True, scale=None, **shape):
        q, k, v, dout, dlse = inputs(tq, tk, **shape)
        cu = (0, tq) if cu is None else cu
        plan = plan_of(q, k, v, causal=causal, cu=cu, cu_kv=cu_kv, softmax_scale=scale)
        out, lse = plan.forward(q, k, v)
        gradients = plan.backward(q, k, v, out, lse, dout, dlse=dlse)
        values, bounds = expected.attention(
            q,
            k,
            v,
            cu,
            cu_kv=cu_kv,
            causal=causal,
            scale=scale,
            dout=dout,
            dlse=dlse,
            dtype=q.dtype.name,
        )
        for name, array, value, bound in zip(
            values._fields, (out, lse, *gradients), values, bounds
        ):
            expected.assert_within(self, name, array, value, bound)

    def test_cases(self):
        for name, case in CASES.items():
            with self.subTest(name):
                self.check(**case)


class Memory(unittest.TestCase):
    def test_results_are_written_in_place(self):
        q, k, v, dout, _ = inputs(40)
        plan = plan_of(q, k, v)
        out, lse = numpy.full(q.shape, 7.0, "float32"), numpy.full(q.shape[:2], 7.0, "float32")
        given = plan.forward(q, k, v, out=out, lse=lse)
        self.assertIs(given[0], out)
        self.assertIs(given[1], lse)
        self.assertFalse((out == 7.0).any() or (lse == 7.0).any())
        dq, dk, dv = (numpy.full(x.shape, 7.0, "float32") for x in (q, k, v))
        given = plan.backward(q, k, v, out, lse, dout, dq=dq, dk=dk, dv=dv)
        for mine, returned in zip((dq, dk, dv), given):
            self.assertIs(mine, returned)
            self.assertFalse((mine == 7.0).any())

    def test_inputs_are_read_in_place(self):
        q, k, v, _, _ = inputs(40)
        plan = plan_of(q, k, v)
        first, _ = plan.forward(q, k, v)
        v *= 2  # exact, so is what follows
        second, _ = plan.forward(q, k, v)
        numpy.testing.assert_array_equal(second, 2 * first)

    def test_views_of_a_fused_buffer_BC_025(self):
        """q, k, v and their gradients as interleaved views, heads also backwards: equal bits."""
        random = numpy.random.default_rng(SEED)
        for name, order in (("forward", slice(None)), ("heads reversed", slice(None, None, -1))):
            fused = random.standard_normal((8, 3, 2, 4)).astype("float32")
            views = [fused[:, i, order] for i in range(3)]
            copies = [numpy.ascontiguousarray(view) for view in views]
            dout = random.standard_normal((8, 2, 4)).astype("float32")
            plan = plan_of(*copies)
            out, lse = plan.forward(*copies)
            strided_out = numpy.zeros((8, 2, 2, 4), "float32")[:, 1, order]
            strided_lse = numpy.zeros((2, 8), "float32").T
            plan.forward(*views, out=strided_out, lse=strided_lse)
            fused_gradient = numpy.zeros_like(fused)
            gradient_views = [fused_gradient[:, i, order] for i in range(3)]
            expected_gradients = plan.backward(*copies, out, lse, dout)
            plan.backward(
                *views,
                strided_out,
                strided_lse,
                dout,
                **dict(zip(("dq", "dk", "dv"), gradient_views)),
            )
            with self.subTest(name):
                numpy.testing.assert_array_equal(strided_out, out)
                numpy.testing.assert_array_equal(strided_lse, lse)
                for view, copy in zip(gradient_views, expected_gradients):
                    numpy.testing.assert_array_equal(view, copy)

    def test_numpys_scalars_are_numbers(self):
        q, k, v, _, _ = inputs(20)
        results = []
        for number, integer, boolean in (
            (float, int, bool),
            (numpy.float32, numpy.int64, numpy.bool_),
            (numpy.float16, numpy.uint8, numpy.bool_),
        ):
            attention = cpattn.Attention(
                cpattn.self_group(),
                causal=boolean(False),
                chunk_tokens=integer(16),
                timeout=number(30.0),
                verify_checksum=boolean(True),
            )
            self.assertEqual(attention.options["chunk_tokens"], 16)
            plan = attention.plan(
                num_heads=4,
                num_kv_heads=2,
                head_dim=24,
                seq_len=integer(20),
                softmax_scale=number(0.5),
            )
            results.append(plan.forward(q, k, v)[0])
        for result in results[1:]:
            numpy.testing.assert_array_equal(result, results[0])

    def test_read_only_inputs_are_fine(self):
        q, k, v, _, _ = inputs(20)
        plan = plan_of(q, k, v)
        expected_out, _ = plan.forward(q, k, v)
        for array in (q, k, v):
            array.flags.writeable = False
        numpy.testing.assert_array_equal(plan.forward(q, k, v)[0], expected_out)


class Refusals(unittest.TestCase):
    def assert_refused(self, pattern, call, *arguments, **keywords):
        with self.assertRaisesRegex(cpattn.InvalidArgumentError, pattern) as caught:
            call(*arguments, **keywords)
        self.assertIsInstance(caught.exception, ValueError)
        self.assertIsInstance(caught.exception, cpattn.Error)

    def test_arrays(self):
        q, k, v, _, _ = inputs(20)
        plan = plan_of(q, k, v)
        frozen = numpy.empty(q.shape, "float32")
        frozen.flags.writeable = False
        for pattern, arguments in (
            (r"q: dtype int32, expected float32", (q.astype("int32"), k, v)),
            (r"k: dtype float64", (q, k.astype("float64"), v)),
            (r"v: a list, expected a numpy array", (q, k, v.tolist())),
            (r"q: a NoneType", (None, k, v)),
            (r"last stride 2; expected .* contiguous last dimension", (q[..., ::2], k, v)),
            (r"q: f32 \[19, 4, 24\].* expected f32 \[20, 4, 24\]", (q[1:], k, v)),
            (r"k: f16 ", (q, k.astype("float16"), v)),
            (r"q: shape \[20, 96\], expected three dimensions", (q.reshape(20, 96), k, v)),
            (r"q: dtype >f4", (q.astype(">f4"), k, v)),
        ):
            with self.subTest(pattern):
                self.assert_refused(pattern, plan.forward, *arguments)
        self.assert_refused("out: read-only", plan.forward, q, k, v, out=frozen)
        self.assert_refused("lse: dtype float64", plan.forward, q, k, v, lse=numpy.empty((20, 4)))
        plan.forward(q, k, v)  # a refusal breaks nothing

    def test_outputs_that_overlap(self):
        q, k, v, dout, _ = inputs(20, kv_heads=4)
        plan = plan_of(q, k, v)
        out, lse = plan.forward(q, k, v)
        self.assert_refused("out", plan.forward, q, k, v, out=q)
        self.assert_refused("dq", plan.backward, q, k, v, out, lse, dout, dq=out)
        same = numpy.empty(k.shape, "float32")
        self.assert_refused("dk|dv", plan.backward, q, k, v, out, lse, dout, dk=same, dv=same)

    def test_problems(self):
        attention = cpattn.Attention(cpattn.self_group())
        heads = dict(num_heads=4, head_dim=8)
        for pattern, problem in (
            (r"cu_seqlens\[1\]: nan, expected an integer", dict(cu_seqlens=[0, float("nan")])),
            (
                r"cu_seqlens: \[0.0, 4.0\] of float64, expected integers",
                dict(cu_seqlens=numpy.array([0, 4.0])),
            ),
            (r"cu_seqlens_q\[2\] is 3, expected at least", dict(cu_seqlens=[0, 5, 3])),
            (r"cu_seqlens_q\[0\] is 1, expected 0", dict(cu_seqlens=[1, 5])),
            (r"cu_seqlens: 7, expected a sequence", dict(cu_seqlens=7)),
            (r"seq_len: True, expected an integer", dict(seq_len=True)),
            (r"seq_len: 9223372036854775808, expected a 64-bit", dict(seq_len=2**63)),
            (
                r"cu_seqlens\[1\]: 18446744073709551615, expected a 64-bit integer",
                dict(cu_seqlens=numpy.array([0, 2**64 - 1], "uint64")),
            ),
            (r"seq_len, cu_seqlens: expected one", dict()),
            (r"dtype: int8", dict(seq_len=4, dtype="int8")),
            (r"dtype: dtype float64", dict(seq_len=4, dtype="float64")),
            (r"num_kv_heads = 3", dict(seq_len=4, num_kv_heads=3)),
            (r"softmax_scale", dict(seq_len=4, softmax_scale=float("nan"))),
            (r"softmax_scale: True, expected a number", dict(seq_len=4, softmax_scale=True)),
            (r"softmax_scale: 10+, expected a finite", dict(seq_len=4, softmax_scale=10**400)),
        ):
            with self.subTest(pattern):
                self.assert_refused(pattern, attention.plan, **heads, **problem)
        self.assert_refused("unexpected keyword argument 'heads'", attention.plan, heads=4)

    def test_options(self):
        for pattern, options in (
            (r"option 'chunk_token': unknown, expected causal \| sharding", dict(chunk_token=3)),
            (r"chunk_tokens: 3.5, expected an integer", dict(chunk_tokens=3.5)),
            (r"sharding: 'x', expected contiguous", dict(sharding="x")),
            (r"verify_checksum: 1, expected True or False", dict(verify_checksum=1)),
            (r"causal: 'yes', expected True or False", dict(causal="yes")),
            (r"chunk_tokens: 3.5, expected an integer", dict(chunk_tokens=numpy.float32(3.5))),
            (r"chunk_tokens: True, expected an integer", dict(chunk_tokens=numpy.bool_(True))),
            (r"mask: 'full', expected causal=True or False", dict(mask="full")),
            (r"isa: x, expected generic", dict(isa="x")),
            (r"group: a str, expected cpattn.world", dict(group="world")),
        ):
            with self.subTest(pattern):
                self.assert_refused(pattern, cpattn.Attention, **options)

    def test_ranges_are_refused_by_the_plan(self):
        attention = cpattn.Attention(cpattn.self_group(), chunk_tokens=0)
        self.assert_refused("chunk_tokens 0", attention.plan, seq_len=4, num_heads=1, head_dim=8)

    def test_a_part_this_machine_lacks(self):
        with self.assertRaises(cpattn.UnsupportedError) as caught:
            cpattn.Attention(cpattn.self_group(), isa="neon")
        self.assertIsInstance(caught.exception, NotImplementedError)


class OnADevice:
    """What a tensor on another device answers when it is asked for its memory."""

    dtype = "float32"

    def __init__(self, kind):
        self.kind = kind

    def __dlpack_device__(self):
        return self.kind, 1

    def __dlpack__(self):
        raise AssertionError("asked for memory that the CPU cannot read")


class Devices(unittest.TestCase):
    def test_only_the_cpu(self):
        q, k, v, _, _ = inputs(20)
        plan = plan_of(q, k, v)
        for kind, name in ((2, "cuda:1"), (10, "rocm:1"), (77, "of DLPack type 77:1")):
            with self.assertRaisesRegex(ValueError, f"q: device {name}, expected cpu"):
                plan.forward(OnADevice(kind), k, v)


class Threads(unittest.TestCase):
    def test_a_second_thread_is_refused(self):
        """Two calls of one group must not interleave; the first is not disturbed."""
        q, k, v, _, _ = inputs(1500, dim=64)
        long_plan, short_plan = plan_of(q, k, v), plan_of(q[:4], k[:4], v[:4])
        right, _ = long_plan.forward(q, k, v)
        for _ in range(100):  # the second thread may come too late, or too early, but not always
            results = []
            other = threading.Thread(target=lambda: results.append(long_plan.forward(q, k, v)[0]))
            other.start()
            text = ""
            while other.is_alive() and not text:
                try:
                    short_plan.forward(q[:4], k[:4], v[:4])
                except cpattn.InvalidArgumentError as error:
                    text = str(error)
            other.join()
            if results and text:
                break
        numpy.testing.assert_array_equal(results[0], right)
        self.assertIn("in use by another thread", text)


class Explain(unittest.TestCase):
    def test_a_problem_that_runs(self):
        attention = cpattn.Attention(cpattn.self_group(), isa="generic")
        answer = attention.explain(seq_len=100, num_heads=4, head_dim=64)
        self.assertTrue(answer["is_supported"])
        self.assertEqual(answer["refusals"], [])
        self.assertEqual(answer["kernels"], "cpu/generic")
        self.assertEqual((answer["q_rows"], answer["visible_pairs"]), (100, 5050))
        self.assertEqual(answer["guarantee"], "bitwise across CP sizes")

    def test_one_that_does_not(self):
        attention = cpattn.Attention(cpattn.self_group())
        answer = attention.explain(seq_len=100, num_heads=4, num_kv_heads=3, head_dim=640)
        self.assertFalse(answer["is_supported"])
        self.assertIn("num_kv_heads = 3", answer["refusals"][0])


if __name__ == "__main__":
    unittest.main()
