"""Run under mpirun with 3 ranks or more: what concerns groups, one case by its name.

Every rank prints "ok" when the case came out right.
"""

import sys
import time

import numpy
import torch
from mpi4py import MPI
from parity_program import CHUNK_TOKENS, CU_SEQLENS, by_torch, digest, problem

import cpattn
import cpattn.torch

WORLD = MPI.COMM_WORLD


def deal_of(group):
    return cpattn.Sharding(cu_seqlens=CU_SEQLENS, group=group, chunk_tokens=CHUNK_TOKENS)


def run(group):
    return digest(by_torch(group, deal_of(group), "zigzag", True))


def two_groups():
    """Two halves of the world at once, and the world in between: every group has its own bits'
    place, and none is remembered for another's call."""
    alone = run(cpattn.self_group())
    part = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    groups = [cpattn.Group(part), cpattn.Group(WORLD), cpattn.self_group()]
    assert [g.size for g in groups] == [part.size, WORLD.size, 1]
    for group in (*groups, *reversed(groups)):
        assert run(group) == alone, group
    part.Free()


def backwards_in_reverse():
    """Forwards on several groups, then their backwards from the last to the first."""
    part = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    torch.manual_seed(1)
    whole = [torch.randn(80, heads, 16) for heads in (4, 2, 2)]
    expected = None
    kept = []
    for group in (cpattn.self_group(), cpattn.Group(part), cpattn.Group(WORLD)):
        deal = cpattn.Sharding(seq_len=80, group=group, chunk_tokens=8)
        local = [deal.shard(x).requires_grad_() for x in whole]
        out = cpattn.torch.context_parallel_attention(*local, group=group, chunk_tokens=8)
        kept.append((deal, local, out))
    for deal, local, out in reversed(kept):
        out.square().sum().backward()
    for deal, local, _ in kept:
        gradients = digest([deal.unshard(x.grad).numpy() for x in local])
        expected = expected or gradients
        assert gradients == expected
    part.Free()


def identity():
    """One group per communicator, for as long as that lives."""
    group = cpattn.Group(WORLD)
    assert cpattn.Group(WORLD) is group and cpattn.Group(group) is group
    for _ in range(5):  # a freed communicator's handle comes back for the next one
        part = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        group = cpattn.Group(part)
        assert group.size == part.size and cpattn.Group(part) is group
        part.Free()
        every = WORLD.Dup()
        assert cpattn.Group(every).size == WORLD.size
        every.Free()
    for wrong, text in ((MPI.COMM_NULL, "COMM_NULL"), (7, "a int"), (MPI.GROUP_EMPTY, "Group")):
        try:
            cpattn.Group(wrong)
        except cpattn.InvalidArgumentError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken for a group")


def refusals():
    """What one rank gets wrong, every rank hears, with one text, and nothing is broken by it."""
    group = cpattn.Group(WORLD)
    is_odd_one = group.rank == 1
    deal = deal_of(group)
    q, k, v = (torch.from_numpy(deal.shard(x)) for x in problem()[:3])
    lengths = dict(cu_seqlens=CU_SEQLENS, chunk_tokens=16)

    def attend(*tensors, **keywords):
        return cpattn.torch.context_parallel_attention(*tensors, group=group, **keywords)

    attention = cpattn.Attention(group, chunk_tokens=16)
    shape = dict(num_heads=6, num_kv_heads=2, head_dim=32, value_dim=16)
    plan = attention.plan(cu_seqlens=lengths["cu_seqlens"], **shape)
    cases = {
        "dtype torch.int32": lambda: attend(q.int() if is_odd_one else q, k, v, **lengths),
        "device meta": lambda: attend(q.to("meta") if is_odd_one else q, k, v, **lengths),
        "a NoneType": lambda: attend(None if is_odd_one else q, k, v, **lengths),
        "mask differs": lambda: attend(q, k, v, causal=not is_odd_one, **lengths),
        "chunk_tokens differs": lambda: attend(
            q, k, v, cu_seqlens=lengths["cu_seqlens"], chunk_tokens=32 if is_odd_one else 16
        ),
        "cu_seqlens_q differs": lambda: attend(
            q, k, v, cu_seqlens=(0, 300) if is_odd_one else (0, 30, 300), chunk_tokens=16
        ),
        "cu_seqlens_q[1] differs": lambda: attend(
            q, k, v, cu_seqlens=(0, 31 if is_odd_one else 30, 300), chunk_tokens=16
        ),
        "dtype differs": lambda: attend(*(x.half() if is_odd_one else x for x in (q, k, v))),
        "requires_grad differs": lambda: attend(
            q.clone().requires_grad_(is_odd_one), k, v, **lengths
        ),
        "rank 1: option 'window'": lambda: attend(
            q, k, v, **lengths, **(dict(window=1) if is_odd_one else {})
        ),
        "rank 1: mask: 'full', expected causal=True or False": lambda: attend(
            q, k, v, **lengths, **(dict(mask="full") if is_odd_one else {})
        ),
        "rank 1: cu_seqlens[70]: 9223372036854775808, expected a 64-bit": lambda: attend(
            q, k, v, cu_seqlens=[0] * 70 + [2**63 if is_odd_one else 300]
        ),
        "rank 1: cu_seqlens_q[2] is 300, expected at least cu_seqlens_q[1] = 301": lambda: attend(
            q, k, v, cu_seqlens=(0, 301, 300) if is_odd_one else (0, 300, 300)
        ),
        "rank 1: group, cp_group: two names": lambda: attend(
            q, k, v, **lengths, **(dict(cp_group=cpattn.self_group()) if is_odd_one else {})
        ),
        "rank 1: q: f32": lambda: attend(q[1:] if is_odd_one else q, k, v, **lengths),
        "rank 1: seq_len": lambda: attention.plan(seq_len=0.5 if is_odd_one else 7, **shape),
        "document 0 differs": lambda: attention.plan(seq_len=8 if is_odd_one else 7, **shape),
        "rank 1: v: a str": lambda: plan.forward(q, k, "v" if is_odd_one else v),
        "rank 1: x: ": lambda: deal.unshard(q[1:] if is_odd_one else q),
        "rank 1: x: a list": lambda: deal.unshard([1.0] if is_odd_one else q),
        "of_keys differs": lambda: deal.unshard(q, of_keys=is_odd_one),
        "rank 1: timeout: nan": lambda: deal.unshard(
            q, timeout=float("nan") if is_odd_one else 60.0
        ),
        "rank 1: TypeError: ": lambda: attention.plan(
            seq_len=7, **shape, **(dict(window=1) if is_odd_one else {})
        ),
        "rank 1: timeout": lambda: cpattn.Attention(
            group, timeout=float("inf") if is_odd_one else 50.0
        ).plan(seq_len=7, **shape),
        "rank 1: timeout: inf": lambda: attend(
            q, k, v, **lengths, **(dict(timeout=float("inf")) if is_odd_one else {})
        ),
        "this machine": lambda: attend(
            q, k, v, **lengths, **(dict(isa="neon") if is_odd_one else {})
        ),
        "max_message_bytes is 4096, expected 1073741824": lambda: cpattn.Attention(
            group, max_message_bytes=4096
        ).plan(seq_len=7, **shape),
        "rank 1: data: a str, expected bytes": lambda: group.all_gather("x" if is_odd_one else b""),
        "rank 1: timeout: -1": lambda: group.all_gather(b"", -1.0 if is_odd_one else 60.0),
        **sums(group, is_odd_one),
    }
    for expected, call in cases.items():
        text = ""
        try:
            call()
        except cpattn.InvalidArgumentError as error:
            text = str(error)
        assert expected in text, (expected, text)
        assert set(WORLD.allgather(text)) == {text}
    attend(q, k, v, **lengths)
    plan.forward(q, k, v)
    assert group.all_gather(b"x" * group.rank) == [b"x" * r for r in range(group.size)]
    one = numpy.ones((1, 2), "float32")
    total = cpattn.ordered_sum(one, [group.rank], group.size, group=group)
    assert total.tolist() == [group.size] * 2


def sums(group, is_odd_one):
    """Ordered sums that one rank spoils: what is refused, and the call."""
    leaves = group.size
    row = numpy.ones((1, 2), "float32")

    def ordered_sum(partials=row, numbers=(group.rank,), count=leaves, **keywords):
        return lambda: cpattn.ordered_sum(partials, numbers, count, group=group, **keywords)

    def spoiled(**arguments):
        return ordered_sum(**(arguments if is_odd_one else {}))

    def leaf_by_leaf(values=row[0], leaf=group.rank, out=None):
        def call():
            total = cpattn.OrderedSum(leaves, 2, group=group)
            total.add(leaf, values)
            return total.all_reduce(out)

        return call

    def spoiled_leaf(**arguments):
        return leaf_by_leaf(**(arguments if is_odd_one else {}))

    def too_long():
        """4 PiB, more than there are addresses."""
        return cpattn.OrderedSum(leaves, 2**50 if is_odd_one else 2, group=group).all_reduce()

    frozen = numpy.ones(2, "float32")
    frozen.flags.writeable = False
    return {
        "MemoryError: Unable to allocate": too_long,
        "rank 1: dtype: int32, expected float32": spoiled(partials=row.astype("int32")),
        "rank 1: leaves: 2 numbers, expected 1": spoiled(numbers=(0, 1)),
        "rank 1: x: a NoneType": spoiled(partials=None),
        "rank 1: leaf 9: expected": spoiled(numbers=(9,)),
        "rank 1: num_leaves -1": spoiled(count=-1),
        "rank 1: timeout: 0": spoiled(timeout=0),
        "num_leaves differs between ranks": spoiled(count=leaves + 1),
        "size differs between ranks": spoiled(partials=numpy.ones((1, 3), "float32")),
        "element bytes differs between ranks": spoiled(partials=numpy.ones((1, 2))),
        "rank 1: values: 3 numbers, expected 2": spoiled_leaf(values=numpy.ones(3, "float32")),
        "rank 1: values: dtype float64, expected float32": spoiled_leaf(values=numpy.ones(2)),
        "rank 1: values: a list": spoiled_leaf(values=[1.0, 2.0]),
        "rank 1: TypeError: add(): incompatible": spoiled_leaf(leaf="first"),
        "rank 1: result: 3 numbers, expected 2": spoiled_leaf(out=numpy.ones(3, "float32")),
        "rank 1: result: read-only": spoiled_leaf(out=frozen),
    }


def no_bfloat16():
    """What cannot be allocated on one rank is refused on all: numpy may lack bfloat16."""
    group = cpattn.Group(WORLD)
    is_odd_one = group.rank == 1
    sys.modules["ml_dtypes"] = None  # importing it is an ImportError
    plan = cpattn.Attention(group).plan(seq_len=9, num_heads=2, head_dim=8, dtype="bfloat16")
    q, k, v, out = (torch.ones(plan.q_rows, 2, 8).bfloat16() for _ in range(4))
    _, lse = plan.forward(q, k, v, out=out)
    like = [torch.empty_like(q) for _ in range(3)]
    gradients = dict(zip(("dq", "dk", "dv"), like))
    for call in (
        lambda: plan.forward(q, k, v, out=None if is_odd_one else out),
        lambda: plan.backward(q, k, v, out, lse, q, **({} if is_odd_one else gradients)),
    ):
        text = ""
        try:
            call()
        except cpattn.InvalidArgumentError as error:
            text = str(error)
        assert "rank 1: " in text and "numpy has no bfloat16" in text, text
        assert set(WORLD.allgather(text)) == {text}
    plan.backward(q, k, v, out, lse, q, **gradients)


def closed_forms():
    """Public reports whose right answers are known in closed form, by their ids; one rank, two and
    all. Answers have six digits behind the point; what f32 adds to that is less than as much."""
    pair = WORLD.Split(WORLD.rank // 2, WORLD.rank)
    for group in (cpattn.self_group(), cpattn.Group(pair), cpattn.Group(WORLD)):
        for sharding in ("zigzag", "contiguous"):
            deal = cpattn.Sharding(seq_len=8, group=group, sharding=sharding, chunk_tokens=1)
            places = torch.arange(8.0)[:, None, None]

            def attend(q, k, v, **keywords):
                """Whole out, lse, dq, dk, dv of dout = 1."""
                local = [deal.shard(x).requires_grad_() for x in (q, k, v)]
                out, lse = cpattn.torch.context_parallel_attention(
                    *local,
                    group=group,
                    sharding=sharding,
                    chunk_tokens=1,
                    softmax_scale=1.0,
                    return_lse=True,
                    **keywords,
                )
                out.sum().backward()
                return [deal.unshard(x) for x in (out, lse, *(x.grad for x in local))]

            def close(one, other):
                torch.testing.assert_close(one.detach(), other, rtol=1e-6, atol=1e-6)

            one, zero = torch.ones(8, 1, 1), torch.zeros(8, 1, 1)
            # BC-046, BC-047: delta from the whole out, and every hop its own keys.
            close(attend(zero, places, places, causal=False)[2], 5.25 * one)
            close(attend(one, zero, places, causal=False)[3], places - 3.5)
            # BC-023: dk, dv summed over the query heads of a group.
            q, k, v = torch.ones(8, 8, 1), torch.zeros(8, 2, 1), places.expand(8, 2, 1).contiguous()
            _, _, _, dk, dv = attend(q, k, v)
            counts = 1 / torch.arange(1.0, 9.0)
            means = torch.arange(8.0) / 2
            right_dv = torch.stack([counts[j:].sum() for j in range(8)])
            right_dk = torch.stack([(counts * (j - means))[j:].sum() for j in range(8)])
            close(dv, 4 * right_dv[:, None, None].expand(8, 2, 1))
            close(dk, 4 * right_dk[:, None, None].expand(8, 2, 1))
            # BC-106: positions are the document's, on every rank.
            angles = torch.from_numpy(deal.positions()).float()
            turned = torch.stack((angles.cos(), angles.sin()), 1)[:, None]
            out, lse = cpattn.torch.context_parallel_attention(
                turned,
                turned,
                deal.shard(places),
                group=group,
                sharding=sharding,
                chunk_tokens=1,
                softmax_scale=1.0,
                return_lse=True,
            )
            right = "1 1.489484 1.628140 1.698542 1.789443 1.989804 2.295182 2.489191"
            close(deal.unshard(lse)[:, 0], torch.tensor([float(x) for x in right.split()]))
            close(deal.unshard(out)[7, 0, 0], torch.tensor(3.397075))


def idle_ranks():
    """Fewer chunks than ranks: a rank without rows takes part all the same."""
    bits = set()
    for group in (cpattn.self_group(), cpattn.Group(WORLD)):
        deal = cpattn.Sharding(seq_len=5, group=group, chunk_tokens=8)
        torch.manual_seed(2)
        local = [deal.shard(torch.randn(5, 2, 8)).requires_grad_() for _ in range(3)]
        out = cpattn.torch.context_parallel_attention(*local, group=group, chunk_tokens=8)
        out.sum().backward()
        bits.add(
            digest([deal.unshard(x).detach().numpy() for x in (out, *(x.grad for x in local))])
        )
    assert len(bits) == 1


def dual_chunk():
    """The layout of trainers that shard by themselves: rank r has parts r and 2P-1-r of 2P."""
    group = cpattn.Group(WORLD)
    tokens = 8 * group.size
    deal = cpattn.Sharding(seq_len=tokens, group=group, sharding="dual_chunk", chunk_tokens=4)
    parts = numpy.arange(tokens).reshape(2 * group.size, 4)
    mine = numpy.concatenate((parts[group.rank], parts[2 * group.size - 1 - group.rank]))
    numpy.testing.assert_array_equal(deal.index(), mine)
    torch.manual_seed(3)
    whole = [torch.randn(tokens, 2, 8) for _ in range(3)]
    out = cpattn.torch.context_parallel_attention(
        *(deal.shard(x) for x in whole), group=group, sharding="dual_chunk", chunk_tokens=4
    )
    alone = cpattn.torch.context_parallel_attention(
        *whole, group=cpattn.self_group(), chunk_tokens=4
    )
    assert torch.equal(deal.unshard(out), alone)


def late_peer():
    """A rank that stays away is a CommError for the others, at the deadline that was asked for."""
    group = cpattn.Group(WORLD)
    part = WORLD.Split(0, WORLD.rank)
    deal = cpattn.Sharding(seq_len=64, group=group, chunk_tokens=8)
    x = deal.shard(torch.randn(64, 2, 8))
    if group.rank != 1:
        started = time.monotonic()
        try:
            cpattn.torch.context_parallel_attention(
                x, x, x, group=group, chunk_tokens=8, timeout=1.0
            )
        except cpattn.CommError as error:
            assert "nothing from rank" in str(error), error
        else:
            raise AssertionError("nobody missed rank 1")
        assert 0.9 < time.monotonic() - started < 20
    part.Barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        globals()[case]()
    sys.stdout.write(f"ok {WORLD.rank}\n")
