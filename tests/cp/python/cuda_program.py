"""Run under mpirun: attention and gradients of one pack of documents on GPUs, which are doubles;
every rank prints the digest of the whole results, which is the same for any number of ranks, for
every exchange, for arrays and for torch's tensors, eagerly and from graphs."""

import hashlib
import sys

import cuda_doubles
import cuda_torch
import numpy
import torch
from cuda_doubles import DlpackArray, Graph, Stream

import cpattn
import cpattn.torch

SEED = 20241130
CU_SEQLENS = (0, 21, 21, 50)
CHUNK_TOKENS = 16
HEADS, KV_HEADS, DIM = 2, 1, 16
STEPS = 2
TYPE = "bfloat16"


def problem(step):
    """q, k, v, dout of the whole pack in f32: each number is a bfloat16."""
    random = numpy.random.default_rng(SEED + step)
    tokens = CU_SEQLENS[-1]
    shapes = [(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    values = (random.standard_normal(shape).astype("float32") for shape in shapes)
    return [(v.view(numpy.uint32) & 0xFFFF0000).view("float32") for v in values]


def digest(deal, shards, maxima):
    parts = [numpy.ascontiguousarray(deal.unshard(shard)) for shard in shards]
    return hashlib.sha256(b"".join(x.tobytes() for x in (*parts, maxima))).hexdigest()[:16]


def by_arrays(gpus, deal, stream, is_replayed):
    """The digest of each step: two passes, whose largest logits accumulate in one place, which is
    read and reset there."""
    plan = cpattn.Attention(gpus, chunk_tokens=CHUNK_TOKENS).plan(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, cu_seqlens=CU_SEQLENS, dtype=TYPE
    )
    index = gpus.rank
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, dout = (DlpackArray((plan.q_rows, h, DIM), TYPE, index) for h in heads)
    out, dq, dk, dv = (
        DlpackArray((plan.q_rows, h, DIM), TYPE, index) for h in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    )
    lse = DlpackArray((plan.q_rows, HEADS), "float32", index)
    maxima = DlpackArray((HEADS,), "float32", index)

    def work():
        plan.forward(q, k, v, out=out, lse=lse, head_maxima=maxima, stream=stream.handle)
        given = (q, k, v, out, lse, dout)
        plan.backward(*given, dq=dq, dk=dk, dv=dv, stream=stream.handle)

    def reset():
        plan.reset_head_maxima(maxima, stream=stream.handle)

    plan.prepare_backward()
    reset()
    graphs = [Graph(stream, work), Graph(stream, reset)] if is_replayed else []
    found = []
    for step in range(STEPS):
        stream.synchronize()
        assert (maxima.here == -numpy.inf).all(), "nothing observed"
        for batch in range(2):
            for array, whole in zip((q, k, v, dout), problem(2 * step + batch)):
                array.put(deal.shard(whole))
            graphs[0].replay(stream) if is_replayed else work()
            stream.synchronize()
        cpattn.max_over_ranks(maxima, gpus, stream=stream.handle)
        results = [x.here for x in (out, lse, dq, dk, dv)]
        found.append(digest(deal, results, maxima.here))
        graphs[1].replay(stream) if is_replayed else reset()
    stream.synchronize()
    for graph in graphs:
        graph.destroy()
    return found


def by_torch(group, deal, stream):
    """The same by autograd, on what torch takes for tensors on a GPU."""
    found = []
    with cuda_torch.on_gpu(group.rank, stream.handle):
        maxima = torch.full((HEADS,), -float("inf"), device=torch.device("cuda", group.rank))
        for step in range(STEPS):
            for batch in range(2):
                q, k, v, dout = (
                    cuda_torch.put(torch.from_numpy(deal.shard(x)).bfloat16())
                    for x in problem(2 * step + batch)
                )
                for tensor in (q, k, v):
                    tensor.requires_grad_()
                out, lse = cpattn.torch.context_parallel_attention(
                    q,
                    k,
                    v,
                    cu_seqlens=CU_SEQLENS,
                    group=group,
                    return_lse=True,
                    head_maxima=maxima,
                    chunk_tokens=CHUNK_TOKENS,
                )
                torch.autograd.backward((out,), (dout,))
                stream.synchronize()
            cpattn.max_over_ranks(
                maxima, group.__dict__["_cuda_groups"][group.rank], stream=stream.handle
            )
            bits = [out, q.grad, k.grad, v.grad]
            out, dq, dk, dv = (
                x.detach().as_subclass(torch.Tensor).view(torch.int16).numpy().view("uint16")
                for x in bits
            )
            lse = lse.detach().as_subclass(torch.Tensor).numpy()
            found.append(digest(deal, (out, lse, dq, dk, dv), maxima.numpy()))
            maxima.fill_(-float("inf"))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--delays" in sys.argv:
        cuda_doubles.machine(delay_seed=1)
    group = cpattn.world()
    deal = cpattn.Sharding(cu_seqlens=CU_SEQLENS, group=group, chunk_tokens=CHUNK_TOKENS)
    stream = Stream(group.rank)
    options = dict(device=group.rank, backend=cuda_doubles.PATH)
    nccl = cpattn.cuda_group(group, exchange="nccl", **options)
    found = [by_arrays(nccl, deal, stream, False), by_arrays(nccl, deal, stream, True)]
    host = cpattn.cuda_group(group, exchange="host", **options)
    found.append(by_arrays(host, deal, stream, False))
    group.__dict__["_cuda_groups"] = {group.rank: nccl}
    found.append(by_torch(group, deal, stream))
    text = " ".join(sorted({",".join(steps) for steps in found}))
    sys.stdout.write(f"rank {group.rank} of {group.size}: {text}\n")
