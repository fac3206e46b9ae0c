"""Run under mpirun: attention and gradients of one pack of documents through numpy and through
torch; every rank prints the digests of the whole tensors, which are the same for any number of
ranks. `--mpi4py`: MPI is mpi4py's, initialised before cpattn is imported."""

import hashlib
import sys

if "--mpi4py" in sys.argv:
    from mpi4py import MPI

import numpy
import torch

import cpattn
import cpattn.torch

SEED = 20240613
CU_SEQLENS = (0, 37, 37, 180, 241, 300)
CHUNK_TOKENS = 16


def problem(dtype="float32"):
    """q, k, v, dout, dlse of the whole pack."""
    random = numpy.random.default_rng(SEED)
    tokens = CU_SEQLENS[-1]
    shapes = ((tokens, 6, 32), (tokens, 2, 32), (tokens, 2, 16), (tokens, 6, 16), (tokens, 6))
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def digest(arrays):
    return hashlib.sha256(
        b"".join(numpy.ascontiguousarray(a).tobytes() for a in arrays)
    ).hexdigest()


def by_numpy(group, deal, sharding, causal):
    q, k, v, dout, dlse = (deal.shard(x) for x in problem())
    attention = cpattn.Attention(group, causal=causal, sharding=sharding, chunk_tokens=CHUNK_TOKENS)
    plan = attention.plan(
        num_heads=6, num_kv_heads=2, head_dim=32, value_dim=16, cu_seqlens=CU_SEQLENS
    )
    out, lse = plan.forward(q, k, v)
    gradients = plan.backward(q, k, v, out, lse, dout, dlse=dlse)
    return [deal.unshard(x) for x in (out, lse, *gradients)]


def by_torch(group, deal, sharding, causal):
    q, k, v, dout, dlse = (torch.from_numpy(deal.shard(x)) for x in problem())
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out, lse = cpattn.torch.context_parallel_attention(
        q,
        k,
        v,
        cu_seqlens=CU_SEQLENS,
        causal=causal,
        sharding=sharding,
        group=group,
        return_lse=True,
        chunk_tokens=CHUNK_TOKENS,
    )
    torch.autograd.backward((out, lse), (dout, dlse))
    return [deal.unshard(x).detach().numpy() for x in (out, lse, q.grad, k.grad, v.grad)]


def digests(group):
    for causal in (True, False):
        found = set()
        for sharding in ("zigzag", "contiguous"):
            deal = cpattn.Sharding(
                cu_seqlens=CU_SEQLENS,
                group=group,
                causal=causal,
                sharding=sharding,
                chunk_tokens=CHUNK_TOKENS,
            )
            for compute in (by_numpy, by_torch):
                found.add(digest(compute(group, deal, sharding, causal)))
        yield f"{'causal' if causal else 'full'} {' '.join(sorted(found))}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = cpattn.Group(MPI.COMM_WORLD) if "--mpi4py" in sys.argv else None
    group = cpattn.world() if world is None else world
    text = f"rank {group.rank} of {group.size}: " + ", ".join(digests(group))
    sys.stdout.write(text + "\n")
