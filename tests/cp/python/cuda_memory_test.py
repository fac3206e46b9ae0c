"""Device memory by the Python face, on the doubles of CUDA and NCCL: rows out of whole arrays and
back, and memory that two functions of the caller give."""

import unittest
from unittest import mock

import cuda_doubles
import cuda_torch
import numpy
import torch
from cuda_doubles import DlpackArray, Graph, InterfaceArray
from cuda_test import DIM, HEADS, TOKENS, OnDoubles, group, plan_on

import cpattn


class Rows(OnDoubles):
    """Rows of whole arrays, where the group's arrays are."""

    LENGTHS = (0, 21, 21, 50)

    def plan(self, gpus):
        return cpattn.Attention(gpus, chunk_tokens=16).plan(
            num_heads=HEADS, head_dim=DIM, cu_seqlens=self.LENGTHS, dtype="bfloat16"
        )

    def test_out_of_an_array_and_back(self):
        plan = self.plan(group())
        whole = numpy.random.default_rng(4).standard_normal((60, HEADS, DIM))
        for kind in (DlpackArray, InterfaceArray):
            x = kind(whole.shape, fill=whole.astype("float32"))
            for stream in (self.stream.handle, None):
                with self.subTest(kind=kind.__name__, stream=stream):
                    cuda_doubles.machine(has_default_stream=1)
                    local = kind((plan.q_rows, HEADS, DIM))
                    back = kind(whole.shape, fill=numpy.zeros(whole.shape, "float32"))
                    late = self.stream if stream else cuda_doubles.DEFAULT_STREAM
                    cuda_doubles.dawdle(late)
                    self.assertIs(plan.shard_rows(x, local, stream=stream), local)
                    self.assertIs(plan.unshard_rows(local, back, stream=stream), back)
                    late.synchronize()
                    numpy.testing.assert_array_equal(local.here, x.here[plan.q_index])
                    numpy.testing.assert_array_equal(back.here[:50], x.here[:50])
                    self.assertFalse(back.here[50:].any(), "rows that are nobody's")

    def test_tensors_of_torch(self):
        plan = self.plan(group())
        with cuda_torch.on_gpu(0, self.stream.handle):
            x = cuda_torch.put(torch.arange(50 * HEADS * DIM).view(50, HEADS, DIM).bfloat16())
            out = cuda_torch.empty((plan.kv_rows, HEADS, DIM), torch.bfloat16)
            plan.shard_rows(x, out, of_keys=True, stream=self.stream.handle)
            self.stream.synchronize()
            plain = [t.as_subclass(torch.Tensor) for t in (x, out)]
            self.assertTrue(torch.equal(plain[0][torch.from_numpy(plan.kv_index)], plain[1]))

    def test_captured_after_a_first_call(self):
        plan = self.plan(group())
        x, local = DlpackArray((50, HEADS, DIM)), DlpackArray((50, HEADS, DIM))

        def work():
            plan.shard_rows(x, local, stream=self.stream.handle)

        with self.assertRaisesRegex(ValueError, r"stream: in capture, expected none until such"):
            Graph(self.stream, work)
        work()
        graph = Graph(self.stream, work)
        x.here[...] = 7.0
        graph.replay(self.stream)
        self.stream.synchronize()
        self.assertTrue((local.here == 7.0).all())
        graph.destroy()

    def test_in_host_memory(self):
        plan = self.plan(cpattn.self_group())
        x = numpy.random.default_rng(6).standard_normal((50, HEADS, DIM)).astype("float32")
        out = numpy.empty_like(x)
        plan.shard_rows(x, out)
        numpy.testing.assert_array_equal(out, x[plan.q_index])
        plan.unshard_rows(x[plan.q_index], out)
        numpy.testing.assert_array_equal(out, x)
        with self.assertRaisesRegex(ValueError, r"local: 3 rows, expected 50"):
            plan.shard_rows(x, out[:3])

    def test_refusals(self):
        plan = self.plan(group())
        x, out = DlpackArray((50, HEADS, DIM)), DlpackArray((50, HEADS, DIM))
        half = DlpackArray((50, HEADS, DIM), "float16")
        for pattern, arguments in (
            (r"x: host memory, expected memory of cuda:0", (x.here.copy(), out)),
            (r"out: host memory, expected memory of cuda:0", (x, x.here.copy())),
            (r"local: f16, but global is f32", (x, half)),
            (r"x: shape \[50, 2\], expected three dimensions", (DlpackArray((50, 2)), out)),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(ValueError, pattern):
                    plan.shard_rows(*arguments, stream=self.stream.handle)


class Allocator(OnDoubles):
    """Device memory out of two Python functions."""

    def setUp(self):
        super().setUp()
        self.held, self.streams = {}, set()

    def allocate(self, size, stream):
        address = cuda_doubles.allocate(size)
        self.held[address] = size
        self.streams.add(stream)
        return address

    def free(self, address):
        del self.held[address]

    def test_plans_take_theirs_and_give_it_back(self):
        gpus = group(allocator=(self.allocate, self.free))
        attention = cpattn.Attention(gpus, chunk_tokens=16)
        problem = dict(num_heads=HEADS, head_dim=DIM, seq_len=TOKENS)
        plan = attention.plan(**problem)
        foreseen = attention.explain(**problem)
        self.assertEqual(sum(self.held.values()), foreseen["forward_memory_bytes"])
        plan.prepare_backward()
        self.assertEqual(
            sum(self.held.values()),
            foreseen["forward_memory_bytes"] + foreseen["backward_memory_bytes"],
        )
        self.assertNotIn(0, self.streams)
        del attention, gpus, plan
        self.assertEqual(self.held, {})

    def test_memory_that_cannot_be_had(self):
        def raises(size, stream):
            raise MemoryError("of the test")

        for give, kind in (
            (lambda size, stream: 0, None),
            (lambda size, stream: "nowhere", TypeError),
            (raises, MemoryError),
        ):
            with self.subTest(kind), mock.patch("sys.unraisablehook") as hook:
                with self.assertRaisesRegex(ValueError, r"cannot allocate \d+ bytes of device"):
                    plan_on(group(allocator=(give, self.free)))
                told = {call.args[0].exc_type for call in hook.call_args_list}
                self.assertEqual(told, set() if kind is None else {kind})

    def test_refusals(self):
        for given in (3, (self.allocate,), (self.allocate, 3), {}):
            with self.subTest(given):
                with self.assertRaisesRegex(ValueError, r"allocator: .*, expected None or a pair"):
                    group(allocator=given)


if __name__ == "__main__":
    unittest.main()
