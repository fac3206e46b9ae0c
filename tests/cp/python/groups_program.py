"""Run under mpirun with 3 ranks or more: what concerns groups, one case by its name.

Every rank prints "ok" when the case came out right.
"""

import sys

import numpy
import torch
from mpi4py import MPI
from parity_program import by_torch, digest

import cpattn
import cpattn.torch

WORLD = MPI.COMM_WORLD


def deal_of(group):
    from parity_program import CHUNK_TOKENS, CU_SEQLENS

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
    q, k, v = (torch.from_numpy(deal.shard(x)) for x in __import__("parity_program").problem()[:3])
    lengths = dict(cu_seqlens=(0, 37, 37, 180, 241, 300), chunk_tokens=16)

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
        "dtype differs": lambda: attend(*(x.half() if is_odd_one else x for x in (q, k, v))),
        "requires_grad differs": lambda: attend(
            q.clone().requires_grad_(is_odd_one), k, v, **lengths
        ),
        "rank 1: option 'window'": lambda: attend(
            q, k, v, **lengths, **(dict(window=1) if is_odd_one else {})
        ),
        "rank 1: q: f32": lambda: attend(q[1:] if is_odd_one else q, k, v, **lengths),
        "rank 1: seq_len": lambda: attention.plan(seq_len=0.5 if is_odd_one else 7, **shape),
        "documents": lambda: attention.plan(seq_len=8 if is_odd_one else 7, **shape),
        "rank 1: v: a str": lambda: plan.forward(q, k, "v" if is_odd_one else v),
        "rank 1: x: ": lambda: deal.unshard(q[1:] if is_odd_one else q),
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


def late_peer():
    """A rank that stays away is a CommError for the others, at the deadline that was asked for."""
    import time

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
    numpy.random.seed(0)
    globals()[sys.argv[1]]()
    sys.stdout.write(f"ok {WORLD.rank}\n")
