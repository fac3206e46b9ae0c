"""The Python face on GPUs, which are the doubles of CUDA and NCCL: executed on the CPU."""

import os
import re
import unittest

import cuda_doubles
import cuda_torch
import expected
import numpy
import torch
from cuda_doubles import DeviceArray, DlpackArray, Graph, InterfaceArray, Stream
from launch import outcome, run_together

import cpattn
import cpattn.torch

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cuda_program.py")
TOKENS, HEADS, KV_HEADS, DIM = 40, 2, 1, 16
MEMORY = dict(q=(HEADS, DIM), k=(KV_HEADS, DIM), v=(KV_HEADS, DIM), out=(HEADS, DIM), lse=(HEADS,))


def group(**options):
    options = {"device": 0, "backend": cuda_doubles.PATH, **options}
    return cpattn.cuda_group(cpattn.self_group(), **options)


def plan_on(gpus, dtype="float32"):
    return cpattn.Attention(gpus, chunk_tokens=16).plan(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, seq_len=TOKENS, dtype=dtype
    )


def arrays(kind, dtype="float32", device=0):
    """q, k, v with numbers, out and lse, by name."""
    random = numpy.random.default_rng(3)
    made = {}
    for name, shape in MEMORY.items():
        kept = "float32" if name == "lse" else dtype
        made[name] = kind((TOKENS, *shape), kept, device)
        if name in ("q", "k", "v"):
            made[name].put(random.standard_normal(made[name].shape))
    return made


class OnDoubles(unittest.TestCase):
    def setUp(self):
        self.addCleanup(cuda_doubles.reset)
        self.stream = Stream()
        self.addCleanup(self.stream.destroy)

    def check_values(self, given):
        """Within the bounds of the arithmetic, which are expected.py's."""
        whole = [given[name].here.astype("float64") for name in ("q", "k", "v")]
        dtype = given["out"].dtype
        values, bounds = expected.attention(*whole, (0, TOKENS), dtype=dtype)
        for name in ("out", "lse"):
            expected.assert_within(
                self, name, given[name].here, getattr(values, name), getattr(bounds, name)
            )


class Protocols(OnDoubles):
    def test_arrays_of_either_protocol(self):
        plan = plan_on(group())
        for kind in (DlpackArray, InterfaceArray):
            with self.subTest(kind.__name__):
                given = arrays(kind)
                result = plan.forward(**given, stream=self.stream.handle)
                self.stream.synchronize()
                self.assertIs(result[0], given["out"])
                self.check_values(given)
        asked_for = {stream for array in arrays(DlpackArray).values() for stream in array.asked_for}
        self.assertEqual(asked_for, set())

    def test_producers_are_told_the_stream(self):
        given = arrays(DlpackArray)
        plan_on(group()).forward(**given, stream=self.stream.handle)
        self.stream.synchronize()
        for array in given.values():
            self.assertEqual(array.asked_for, [self.stream.handle])

    def test_work_waits_for_the_streams_of_producers(self):
        producer = Stream()
        given = arrays(InterfaceArray)
        late = InterfaceArray(given["q"].shape, fill=given["q"].here)
        given["q"].here[...] = numpy.nan
        given["q"].stream = producer.handle
        cuda_doubles.dawdle(producer)
        cuda_doubles.copy_in(producer, given["q"], late)
        plan_on(group()).forward(**given, stream=self.stream.handle)
        self.stream.synchronize()
        self.check_values(given)
        producer.synchronize()
        producer.destroy()

    def test_the_default_stream_is_ordered_before_and_after(self):
        cuda_doubles.machine(has_default_stream=1)
        plan = plan_on(group())
        for number in (None, 0, 1):
            with self.subTest(number):
                given = arrays(DlpackArray)
                late = DlpackArray(given["q"].shape, fill=given["q"].here)
                result = DlpackArray(given["out"].shape)
                given["q"].here[...] = numpy.nan
                default = cuda_doubles.DEFAULT_STREAM
                cuda_doubles.dawdle(default)
                cuda_doubles.copy_in(default, given["q"], late)
                plan.forward(**given, stream=number)
                cuda_doubles.copy_in(default, result, given["out"])
                default.synchronize()
                self.assertEqual(given["k"].asked_for, [1])
                self.check_values({**given, "out": result})

    def test_f32_has_the_bits_of_the_cpu(self):
        given = arrays(DlpackArray)
        plan_on(group()).forward(**given, stream=self.stream.handle)
        self.stream.synchronize()
        here = plan_on(cpattn.self_group())
        out, lse = here.forward(*(given[name].here.copy() for name in ("q", "k", "v")))
        numpy.testing.assert_array_equal(given["out"].here, out)
        numpy.testing.assert_array_equal(given["lse"].here, lse)


class HeadMaxima(unittest.TestCase):
    def test_on_the_cpu(self):
        """Accumulates over calls in one place, and is reset there."""
        plan = plan_on(cpattn.self_group())
        maxima = numpy.full(HEADS, 3.0, "float32")
        plan.reset_head_maxima(maxima)
        self.assertTrue((maxima == -numpy.inf).all())
        random = numpy.random.default_rng(5)
        largest = numpy.full(HEADS, -numpy.inf)
        mask = numpy.tri(TOKENS, dtype=bool)
        for _ in range(2):
            q = random.standard_normal((TOKENS, HEADS, DIM)).astype("float32")
            k = random.standard_normal((TOKENS, KV_HEADS, DIM)).astype("float32")
            plan.forward(q, k, k, head_maxima=maxima)
            logits = numpy.einsum("ihd,jd->hij", q.astype(float), k[:, 0]) * DIM**-0.5
            largest = numpy.maximum(largest, logits.max((1, 2), where=mask, initial=-numpy.inf))
        self.assertIs(cpattn.max_over_ranks(maxima, cpattn.self_group()), maxima)
        # A sum of DIM products, a scale and a rounding or two: relative to what is added up.
        size = numpy.abs(q).max() * numpy.abs(k).max() * DIM**0.5
        numpy.testing.assert_allclose(maxima, largest, rtol=0, atol=(DIM + 4) * 2.0**-24 * size)

    def test_refusals(self):
        plan = plan_on(cpattn.self_group())
        q, k = numpy.zeros((TOKENS, HEADS, DIM), "f4"), numpy.zeros((TOKENS, KV_HEADS, DIM), "f4")
        for pattern, maxima in (
            (r"head_maxima: dtype float64, expected float32", numpy.zeros(HEADS)),
            (r"head_maxima: shape \[1, 2\], expected one dimension", numpy.zeros((1, HEADS), "f4")),
            (r"head_maxima: \[3\], stride 1; expected \[2\]", numpy.zeros(3, "f4")),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(ValueError, pattern):
                    plan.forward(q, k, k, head_maxima=maxima)
                with self.assertRaisesRegex(ValueError, pattern):
                    plan.reset_head_maxima(maxima)

    def test_by_torch(self):
        """Of a batch, the largest of all its documents."""
        torch.manual_seed(1)
        q, k = torch.randn(TOKENS, 3, HEADS, DIM), torch.randn(TOKENS, 3, KV_HEADS, DIM)
        attend = cpattn.torch.context_parallel_attention
        options = dict(group=cpattn.self_group(), chunk_tokens=16)
        together, one_by_one = torch.full((2, HEADS), -float("inf"))
        attend(q, k, k, qkv_format="sbhd", head_maxima=together, **options)
        for b in range(3):
            attend(q[:, b], k[:, b], k[:, b], head_maxima=one_by_one, **options)
        self.assertTrue(torch.equal(together, one_by_one))
        self.assertTrue(torch.isfinite(together).all())
        for pattern, maxima in (
            (r"head_maxima: a list, expected a torch.Tensor", [0.0]),
            (r"head_maxima: torch.float64 \[2\] on cpu, expected", torch.zeros(2).double()),
            (r"head_maxima: torch.float32 \[3\] on cpu", torch.zeros(3)),
            (r"head_maxima: torch.float32 \[2\] on meta", torch.zeros(2, device="meta")),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(ValueError, pattern):
                    attend(q[:, 0], k[:, 0], k[:, 0], head_maxima=maxima, **options)


class Refusals(OnDoubles):
    def test_machines(self):
        for error, pattern, fields in (
            ("no driver", r"no CUDA driver on this machine", dict(driver_version=0)),
            ("old driver", r"older than the library: it knows .* 12.4", dict(driver_version=12040)),
            ("no GPU", r"no GPU that it gives to this process", dict(num_devices=0)),
            ("old GPU", r"is sm_75: the kernels need sm_80", dict(compute_capability=75)),
        ):
            with self.subTest(error):
                cuda_doubles.machine(**fields)
                with self.assertRaisesRegex(cpattn.UnsupportedError, pattern):
                    group()
                cuda_doubles.reset()
        with self.assertRaisesRegex(cpattn.UnsupportedError, r"CUDA backend ./nothing.so: "):
            group(backend="./nothing.so")

    def test_arguments_of_groups(self):
        for pattern, options in (
            (r"device cuda:99: this machine has cuda:0 to cuda:7", dict(device=99)),
            (r"device: '0', expected an integer", dict(device="0")),
            (r"exchange: 'ucx', expected auto \| nccl \| host", dict(exchange="ucx")),
            (r"timeout: 0, expected 0.001", dict(timeout=0)),
            (r"nccl_comm is set, expected none", dict(exchange="host", nccl_comm=64)),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(ValueError, pattern):
                    group(**options)

    def test_arrays(self):
        plan, here = plan_on(group()), plan_on(cpattn.self_group())
        good = arrays(DlpackArray)
        on_host = good["q"].here.copy()
        other = arrays(DlpackArray, device=1)
        strange = DlpackArray(good["q"].shape)
        strange.address += 4
        half = InterfaceArray(good["q"].shape, "bfloat16")
        class Nowhere(DeviceArray):
            """Device memory that speaks no protocol."""
        for pattern, change in (
            (r"q: host memory, expected memory of cuda:0", dict(q=on_host)),
            (r"q: device cpu, expected cuda:0", dict(q=torch.from_numpy(on_host))),
            (r"k: device cuda:1, expected cuda:0", dict(k=other["k"])),
            (r"q: address 0x\w+4, expected a multiple of 16", dict(q=strange)),
            (r"q: typestr <V2, expected float32", dict(q=half)),
            (r"q: a Nowhere, expected a tensor in memory of cuda:0", dict(q=Nowhere((1, 1, 1)))),
            (r"out: None, expected an array in memory of cuda:0", dict(out=None)),
            (r"lse: None, expected an array", dict(lse=None)),
            (r"head_maxima: host memory", dict(head_maxima=numpy.zeros(HEADS, "f4"))),
            (r"stream: 'x', expected the handle of a CUDA stream", dict(stream="x")),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(ValueError, pattern):
                    plan.forward(**{**good, "stream": self.stream.handle, **change})
        with self.assertRaisesRegex(ValueError, r"dq: None, expected an array in memory of cuda:0"):
            plan.backward(good["q"], good["k"], good["v"], good["out"], good["lse"], good["out"])
        # By the address alone: a GPU the interface does not tell.
        elsewhere = arrays(InterfaceArray, device=1)
        with self.assertRaisesRegex(ValueError, r"v: memory of cuda:1, expected memory of cuda:0"):
            plan.forward(**{**good, "v": elsewhere["v"]}, stream=self.stream.handle)
        # And shards in host memory.
        with self.assertRaisesRegex(ValueError, r"q: device cuda:0, expected cpu"):
            here.forward(good["q"], good["k"].here, good["v"].here)
        with self.assertRaisesRegex(ValueError, r"q: memory of a GPU, expected cpu"):
            here.forward(elsewhere["q"], good["k"].here, good["v"].here)
        with self.assertRaisesRegex(ValueError, r"v: memory of cuda:0, expected host memory"):
            here.forward(on_host, good["k"].here.copy(), good["v"].here)
        with self.assertRaisesRegex(ValueError, r"stream: 3, expected None where shards are in"):
            here.forward(on_host, on_host[:, :1], on_host[:, :1], stream=3)

    def test_what_cannot_be_captured(self):
        gpus = group()
        plan, good = plan_on(gpus, "bfloat16"), arrays(DlpackArray, "bfloat16")
        dq = DlpackArray(good["q"].shape, "bfloat16")
        dk, dv = (DlpackArray(good["k"].shape, "bfloat16") for _ in range(2))
        foreign = InterfaceArray(good["lse"].shape)
        foreign.stream = 2 * self.stream.handle
        maxima = DlpackArray((HEADS,))

        def work():
            given = [good[name] for name in ("q", "k", "v", "out", "lse", "out")]
            with self.assertRaisesRegex(ValueError, r"stream: in capture, expected none until"):
                plan.backward(*given, dq=dq, dk=dk, dv=dv, stream=self.stream.handle)
            with self.assertRaisesRegex(ValueError, r"lse: written in stream \d+, expected stream"):
                plan.forward(**{**good, "lse": foreign}, stream=self.stream.handle)
            with self.assertRaisesRegex(ValueError, r"stream: in capture, expected one whose work"):
                cpattn.max_over_ranks(maxima, gpus, stream=self.stream.handle)
            plan.forward(**good, stream=self.stream.handle)

        graph = Graph(self.stream, work)
        graph.replay(self.stream)
        self.stream.synchronize()
        graph.destroy()

    def test_isa(self):
        with self.assertRaisesRegex(ValueError, r"isa: generic, expected None: the kernels are"):
            cpattn.Attention(group(), isa="generic")


class Torch(OnDoubles):
    """cpattn.torch on tensors that say they are on a GPU (cuda_torch.py)."""

    def setUp(self):
        super().setUp()
        self.ranks = cpattn.self_group()
        self.addCleanup(self.ranks.__dict__.pop, "_cuda_groups", None)
        self.ranks.__dict__["_cuda_groups"] = {0: group()}

    def inputs(self, device_rows=TOKENS):
        torch.manual_seed(2)
        shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))
        return [torch.randn(device_rows, *shape).bfloat16() for shape in shapes]

    def attend(self, *tensors, **keywords):
        keywords.setdefault("group", self.ranks)
        return cpattn.torch.context_parallel_attention(*tensors, chunk_tokens=16, **keywords)

    def test_mixed_devices_are_refused_by_name(self):
        with cuda_torch.on_gpu(0, self.stream.handle):
            here = self.inputs()
            q, k, v = (cuda_torch.put(x) for x in here)
            with self.assertRaisesRegex(ValueError, r"k: device cpu, expected q's cuda:0"):
                self.attend(q, here[1], v)
            with self.assertRaisesRegex(ValueError, r"q: device cpu, expected cuda:0, where this"):
                self.attend(*here, group=group())
            with self.assertRaisesRegex(ValueError, r"head_maxima: .* on cpu, expected .* cuda:0"):
                self.attend(q, k, v, head_maxima=torch.zeros(HEADS))
            with self.assertRaisesRegex(ValueError, r"q: dtype torch.float64 on cuda:0"):
                self.attend(*(cuda_torch.put(x.double()) for x in here))

    def test_captured_after_a_warm_up(self):
        """The same bits as eagerly, from tensors that are written in place."""
        is_capturing = False
        with cuda_torch.on_gpu(0, self.stream.handle, lambda: is_capturing):
            q, k, v = (cuda_torch.put(x).requires_grad_() for x in self.inputs())
            dout = cuda_torch.put(torch.randn(TOKENS, HEADS, DIM).bfloat16())
            maxima = torch.full((HEADS,), -float("inf"), device=torch.device("cuda", 0))
            found = {}

            def work():
                for tensor in (q, k, v):
                    tensor.grad = None
                out = self.attend(q, k, v, head_maxima=maxima)
                torch.autograd.backward((out,), (dout,))
                found.update(out=out.detach(), grads=[x.grad for x in (q, k, v)])

            def bits():
                self.stream.synchronize()
                kept = [found["out"], *found["grads"], maxima]
                return [x.detach().as_subclass(torch.Tensor).clone() for x in kept]

            is_capturing = True
            with self.assertRaisesRegex(ValueError, r"stream: in capture, expected a call like"):
                work()
            is_capturing = False
            work()
            eager = bits()
            maxima.fill_(-float("inf"))
            is_capturing = True
            graph = Graph(self.stream, work)
            is_capturing = False
            self.assertTrue(torch.isneginf(maxima).all(), "recorded, not done")
            with torch.no_grad():
                for tensor in (q, k, v, dout):
                    tensor.copy_(-tensor)
            graph.replay(self.stream)
            self.assertFalse(all(torch.equal(a, b) for a, b in zip(bits(), eager)))
            with torch.no_grad():
                for tensor in (q, k, v, dout):
                    tensor.copy_(-tensor)
            maxima.fill_(-float("inf"))
            graph.replay(self.stream)
            for replayed, first in zip(bits(), eager):
                self.assertTrue(torch.equal(replayed, first))
            graph.destroy()


class Ranks(unittest.TestCase):
    def test_bits_are_those_of_one_rank(self):
        jobs = [(1, [PROGRAM]), (2, [PROGRAM, "--delays"]), (3, [PROGRAM])]
        texts = set()
        for (ranks, _), job in zip(jobs, run_together(*jobs, timeout=100)):
            self.assertEqual(job.returncode, 0, outcome(job))
            found = sorted(re.findall(r"rank (\d+) of (\d+): (.*)", job.stdout))
            self.assertEqual([int(rank) for rank, _, _ in found], list(range(ranks)), outcome(job))
            texts.update(text for _, _, text in found)
        self.assertEqual(len(texts), 1, texts)
        # One digest of two different steps, for all exchanges and faces.
        self.assertRegex(texts.pop(), r"^([0-9a-f]{16}),(?!\1)[0-9a-f]{16}$")


if __name__ == "__main__":
    unittest.main()
