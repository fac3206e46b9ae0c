"""The differentiable function against torch's own mathematics in float64, and what it refuses."""

import unittest

import expected
import torch

import cpattn
import cpattn.torch
from cpattn._torch_call import MAX_PLANS
from cpattn.torch import ContextParallelAttention, context_parallel_attention

SEED = 20240612
torch.set_num_threads(1)


def attend(*tensors, **keywords):
    keywords.setdefault("group", cpattn.self_group())
    keywords.setdefault("chunk_tokens", 16)
    return context_parallel_attention(*tensors, **keywords)


def inputs(tokens, heads=4, kv_heads=2, dim=24, value_dim=None, dtype=torch.float32, batch=()):
    """q, k, v that want gradients."""
    torch.manual_seed(SEED)
    value_dim = dim if value_dim is None else value_dim
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    tensors = [torch.randn(*batch, tokens, *shape).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def by_torch(q, k, v, causal):
    """out, lse of one document by torch's own operations, differentiable."""
    group = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1)
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    s = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    if causal:
        later = torch.ones(s.shape[1:], dtype=torch.bool).triu(1 + s.shape[2] - s.shape[1])
        s = s.masked_fill(later, -float("inf"))
    return (s.softmax(-1) @ v).transpose(0, 1), s.logsumexp(-1).transpose(0, 1)


def as_numpy(tensor):
    return tensor.detach().double().numpy()


class Gradients(unittest.TestCase):
    def test_against_torch_in_double(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for causal in (True, False):
                with self.subTest(dtype=dtype, causal=causal):
                    self.check(dtype, causal)

    def check(self, dtype, causal):
        q, k, v = inputs(75, dtype=dtype, value_dim=40)
        dout = torch.randn(75, 4, 40).to(dtype)
        dlse = torch.randn(75, 4)
        out, lse = attend(q, k, v, causal=causal, return_lse=True)
        self.assertEqual((out.dtype, lse.dtype), (dtype, torch.float32))
        torch.autograd.backward((out, lse), (dout, dlse))
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        own = by_torch(*doubles, causal)
        torch.autograd.backward(own, (dout.double(), dlse.double()))
        _, bounds = expected.attention(
            *(as_numpy(x) for x in (q, k, v)),
            (0, 75),
            causal=causal,
            dout=as_numpy(dout),
            dlse=as_numpy(dlse),
            dtype=str(dtype).split(".")[1],
        )
        computed = (out, lse, q.grad, k.grad, v.grad)
        values = (*own, *(x.grad for x in doubles))
        for name, one, other, bound in zip(bounds._fields, computed, values, bounds):
            expected.assert_within(self, name, as_numpy(one), as_numpy(other), bound)

    def test_gradcheck(self):
        cases = (
            dict(),
            dict(causal=False),
            dict(cu_seqlens=[0, 3, 3, 7]),
            dict(cu_seqlens=[0, 3, 7], cu_seqlens_kv=[0, 4, 9], softmax_scale=0.7),
        )
        for case in cases:
            with self.subTest(**case):
                keys = case.get("cu_seqlens_kv", [7])[-1]
                torch.manual_seed(SEED)
                tensors = [
                    torch.randn(n, h, d, dtype=torch.float64, requires_grad=True)
                    for n, h, d in ((7, 4, 3), (keys, 2, 3), (keys, 2, 5))
                ]
                function = lambda q, k, v: attend(q, k, v, return_lse=True, **case)  # noqa: E731
                self.assertTrue(torch.autograd.gradcheck(function, tensors))

    def test_gradients_of_any_strides(self):
        """A sum's gradient is one number with zero strides."""
        q, k, v = inputs(40)
        attend(q, k, v).sum().backward()
        first = [x.grad.clone() for x in (q, k, v)]
        for tensor in (q, k, v):
            tensor.grad = None
        (attend(q, k, v) * torch.ones(())).backward(torch.ones(40, 4, 24))
        for tensor, gradient in zip((q, k, v), first):
            self.assertTrue(torch.equal(tensor.grad, gradient))

    def test_a_gradient_of_lse_alone(self):
        q, k, v = inputs(40)
        attend(q, k, v, return_lse=True)[1].sum().backward()
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        by_torch(*doubles, True)[1].sum().backward()
        self.assertFalse(v.grad.any())
        _, bounds = expected.attention(
            *(as_numpy(x) for x in (q, k, v)), (0, 40), dout=0 * as_numpy(q), dlse=torch.ones(40, 4)
        )
        expected.assert_within(self, "dq", q.grad, as_numpy(doubles[0].grad), bounds.dq)
        expected.assert_within(self, "dk", k.grad, as_numpy(doubles[1].grad), bounds.dk)

    def test_only_what_is_asked_for(self):
        q, k, v = inputs(20)
        k.requires_grad_(False)
        attend(q, k, v).sum().backward()
        self.assertIsNone(k.grad)
        self.assertTrue(v.grad.any())
        with torch.no_grad():
            self.assertFalse(attend(q, k, v).requires_grad)

    def test_second_derivatives_are_refused(self):
        q, k, v = inputs(20)
        gradient = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)[0]
        with self.assertRaisesRegex(NotImplementedError, "second derivatives"):
            gradient.sum().backward()

    def test_inputs_changed_before_the_backward_are_noticed(self):
        q, k, v = inputs(20)
        q = q * 1
        out = attend(q, k, v)
        with torch.no_grad():
            q.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            out.sum().backward()


    def test_a_gradient_that_is_a_negated_view(self):
        """As the backward of complex numbers makes them: minus what lies in memory."""
        for dtype in (torch.float32, torch.float64):
            with self.subTest(dtype=dtype):
                q, k, v = inputs(20, dtype=dtype)
                dout = torch.randn(20, 4, 24, dtype=dtype)
                view = torch._neg_view(dout)
                self.assertTrue(view.is_neg())
                attend(q, k, v).backward(view)
                of_views = [x.grad for x in (q, k, v)]
                again = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                attend(*again).backward(-dout)
                for one, other in zip(of_views, again):
                    self.assertTrue(torch.equal(one, other.grad))


class Layouts(unittest.TestCase):
    def test_batches_are_single_documents(self):
        for qkv_format, token_dim in (("bshd", 1), ("sbhd", 0)):
            with self.subTest(qkv_format):
                batched = [x.detach() for x in inputs(40, batch=(3,))]
                moved = [
                    x.transpose(0, 1 - token_dim).contiguous().requires_grad_() for x in batched
                ]
                out, lse = attend(*moved, qkv_format=qkv_format, return_lse=True)
                self.assertEqual(out.shape, moved[0].shape)
                out.sum().backward()
                for b in range(3):
                    single = [x[b].clone().requires_grad_() for x in batched]
                    single_out, single_lse = attend(*single, return_lse=True)
                    single_out.sum().backward()
                    pairs = [(out, single_out), (lse, single_lse)]
                    pairs += [(x.grad, y.grad) for x, y in zip(moved, single)]
                    for many, one in pairs:
                        self.assertTrue(torch.equal(many.select(1 - token_dim, b), one))

    def test_views_of_a_fused_tensor(self):
        torch.manual_seed(SEED)
        fused = torch.randn(40, 3, 4, 24).requires_grad_()
        attend(*fused.unbind(1)).sum().backward()
        parts = [x.detach().contiguous().requires_grad_() for x in fused.unbind(1)]
        attend(*parts).sum().backward()
        self.assertTrue(torch.equal(fused.grad, torch.stack([x.grad for x in parts], 1)))

    def test_heads_and_tokens_are_not_mistaken_BC_027(self):
        heads = torch.arange(4.0)
        v = (10 * heads + torch.arange(4.0)[:, None])[..., None].expand(4, 4, 2).contiguous()
        out = attend(torch.randn(4, 4, 2), torch.zeros(4, 4, 2), v)
        right = 10 * heads + torch.arange(4.0)[:, None] / 2
        torch.testing.assert_close(out, right[..., None].expand(4, 4, 2), rtol=1e-6, atol=0)

    def test_names_of_transformer_engine(self):
        q, k, v = (x.detach() for x in inputs(20))
        group = cpattn.self_group()
        for mask, causal in (("causal", True), ("padding_causal", True), ("no_mask", False)):
            named = context_parallel_attention(
                q, k, v, cp_group=group, attn_mask_type=mask, chunk_tokens=16
            )
            self.assertTrue(torch.equal(named, attend(q, k, v, causal=causal)), mask)


class Arrays(unittest.TestCase):
    def test_a_plan_reads_and_writes_tensors_in_place(self):
        """Through DLPack, bfloat16 as well, which numpy lacks."""
        q, k, v = (x.detach() for x in inputs(40, dtype=torch.bfloat16))
        plan = cpattn.Attention(cpattn.self_group(), chunk_tokens=16).plan(
            seq_len=40, num_heads=4, num_kv_heads=2, head_dim=24, dtype=q.dtype
        )
        out, lse = torch.full_like(q, 7.0), torch.full((40, 4), 7.0)
        self.assertIs(plan.forward(q, k, v, out=out, lse=lse)[0], out)
        same = attend(q, k, v, return_lse=True)
        self.assertTrue(torch.equal(out, same[0]) and torch.equal(lse, same[1]))
        v.mul_(2)  # exact
        plan.forward(q, k, v, out=out, lse=lse)
        self.assertTrue(torch.equal(out, 2 * same[0]))
        with self.assertRaisesRegex(ValueError, "q: .*requires? grad"):
            plan.forward(q.clone().requires_grad_(), k, v, out=out, lse=lse)


class Refusals(unittest.TestCase):
    def test_arguments(self):
        q, k, v = (x.detach() for x in inputs(20))
        for pattern, tensors, keywords in (
            (r"q: dtype torch.int32", (q.int(), k, v), {}),
            (r"k: dtype torch.float16, expected q's torch.float32", (q, k.half(), v), {}),
            (r"q: device meta, expected cpu or cuda", (q.to("meta"), k, v), {}),
            (r"k: device meta, expected cpu or cuda", (q, k.to("meta"), v), {}),
            (r"q: stride 2 in the last dimension", (q[..., ::2], k, v), {}),
            (r"q: shape \[20, 96\], expected \[tokens", (q.flatten(1), k, v), {}),
            (r"q: a ndarray, expected a torch.Tensor", (q.numpy(), k, v), {}),
            (r"q: a negated view.* q.resolve_neg\(\)", (torch._neg_view(q), k, v), {}),
            (
                r"k: a negated view",
                (q.double(), torch._neg_view(k.double()), v.double()),
                {},
            ),
            (
                r"causal: False, expected True or None with attn_mask_type 'causal'",
                (q, k, v),
                dict(causal=False, attn_mask_type="causal"),
            ),
            (
                r"causal: True, expected False or None with attn_mask_type 'no_mask'",
                (q, k, v),
                dict(causal=True, attn_mask_type="no_mask"),
            ),
            (
                r"q: shape \[0, 20, 4, 24\] in bshd, expected a batch",
                tuple(x.expand(0, *x.shape) for x in (q, k, v)),
                dict(qkv_format="bshd"),
            ),
            (r"q: layout torch.sparse_coo", (q.to_sparse(), k, v), {}),
            (r"q, k, v: shapes", (q, k[1:], v), {}),
            (r"qkv_format: 'dhst', expected thd", (q, k, v), dict(qkv_format="dhst")),
            (
                r"cu_seqlens: \[0.0, nan\] of torch.float32, expected integers",
                (q, k, v),
                dict(cu_seqlens=torch.tensor([0, float("nan")])),
            ),
            (r"expected f32 \[19, 4, 24\]", (q, k, v), dict(cu_seqlens=[0, 19])),
            (r"attn_mask_type: 'alibi'", (q, k, v), dict(attn_mask_type="alibi")),
            (
                r"attn_mask_type: 'causal' is aligned to the top left",
                (q, k, v),
                dict(attn_mask_type="causal", cu_seqlens=[0, 20], cu_seqlens_kv=[0, 19]),
            ),
            (r"option 'window': unknown", (q, k, v), dict(window=3)),
            (r"num_kv_heads = 2", (q[:, :3], k, v), {}),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(ValueError, pattern):
                    attend(*tensors, **keywords)

    def test_groups(self):
        q, k, v = (x.detach() for x in inputs(20))
        with self.assertRaisesRegex(ValueError, "group: a int, expected cpattn.world"):
            attend(q, k, v, group=3)
        with self.assertRaisesRegex(ValueError, "two names of one argument"):
            attend(q, k, v, group=cpattn.self_group(), cp_group=3)


class Plans(unittest.TestCase):
    def plans(self):
        return cpattn.self_group().__dict__["_torch_plans"]

    def test_kept_by_what_matters_and_bounded(self):
        q, k, v = (x.detach() for x in inputs(20))
        attend(q, k, v)
        first = next(reversed(self.plans().values()))
        attend(q, k, v)
        self.assertIs(next(reversed(self.plans().values())), first)
        for change in (
            dict(causal=False),
            dict(softmax_scale=0.5),
            dict(sharding="contiguous"),
            dict(chunk_tokens=8),
            dict(cu_seqlens=[0, 7, 20]),
            dict(threads=2),
            dict(isa="generic"),
        ):
            attend(q, k, v, **change)
            self.assertIsNot(next(reversed(self.plans().values())), first, change)
        for chunk_tokens in range(20, 30):
            attend(q, k, v, chunk_tokens=chunk_tokens)
        self.assertEqual(len(self.plans()), MAX_PLANS)

    def test_a_backward_after_its_plan_was_dropped(self):
        q, k, v = inputs(20)
        out = attend(q, k, v)
        for chunk_tokens in range(40, 42 + MAX_PLANS):
            attend(q.detach(), k.detach(), v.detach(), chunk_tokens=chunk_tokens)
        out.sum().backward()
        self.assertTrue(q.grad.any())


class Module(unittest.TestCase):
    def test_it_is_the_function(self):
        q, k, v = inputs(20)
        module = ContextParallelAttention(causal=False, chunk_tokens=16)
        self.assertEqual(list(module.parameters()), [])
        out, lse = module(q, k, v, group=cpattn.self_group(), return_lse=True)
        again = attend(q, k, v, causal=False, return_lse=True)
        self.assertTrue(torch.equal(out, again[0]) and torch.equal(lse, again[1]))
        self.assertIsNone(module.group)  # a call's group is that call's

    def test_the_other_name_of_group(self):
        one = cpattn.self_group()
        q, k, v = (x.detach() for x in inputs(20))
        module = ContextParallelAttention(cp_group=one, chunk_tokens=16)
        self.assertIs(module.group, one)
        self.assertTrue(torch.equal(module(q, k, v, group=one), attend(q, k, v)))
        with self.assertRaisesRegex(ValueError, "two names of one argument"):
            ContextParallelAttention(group=one, cp_group=3)


if __name__ == "__main__":
    unittest.main()
