#!/usr/bin/env python3
"""Trains a small transformer with PyTorch and prints the bits of its loss: the same bits however
many ranks share the sequence, also when their number changes in the middle of a run.

    python3 train_torch.py
    mpirun -n 4 python3 train_torch.py
    mpirun -n 2 python3 train_torch.py --save-at 4 half.bin
    mpirun -n 3 python3 train_torch.py --resume half.bin

Two causal layers (grouped-query attention, RoPE, RMSNorm, SwiGLU, tied embedding) learn the bytes
of a text by Adam; a step's batch is a pack of paragraphs. Ranks hold the same parameters and share
the tokens.

Why the bits do not depend on the number of ranks:
1. cpattn's attention and its gradients have that property by themselves.
2. Everything else treats a row of the sequence on its own, but a BLAS may round a row differently
   in a matrix of another height. So all of it is computed leaf by leaf: a leaf is a chunk of rows
   that is the same at any number of ranks.
3. Sums over rows (the gradients of the parameters, the loss) are made per leaf, and then over the
   leaves by cpattn.OrderedSum, whose order does not depend on who has which.
For 3, every leaf sees the parameters through copies that share their memory (`Parameters.view`):
autograd then leaves each leaf's partial gradient on its own copies.
"""

import argparse
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before torch is imported: the order of a BLAS's sums

import struct

import numpy
import torch
import torch.nn.functional as F

import cpattn
import cpattn.torch

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 256, 64, 2, 4, 2, 16, 128
CHUNK_TOKENS, LEARNING_RATE = 32, 3e-3

SHAPES = {"embedding": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
for layer in range(LAYERS):
    SHAPES.update(
        {
            f"{layer}.norm1": (WIDTH,),
            f"{layer}.qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
            f"{layer}.out": (WIDTH, HEADS * HEAD_DIM),
            f"{layer}.norm2": (WIDTH,),
            f"{layer}.up": (2 * HIDDEN, WIDTH),
            f"{layer}.down": (WIDTH, HIDDEN),
        }
    )
SIZE = sum(int(numpy.prod(shape)) for shape in SHAPES.values())


class Parameters:
    """All parameters and Adam's moments, flat; the same on every rank."""

    def __init__(self):
        random = numpy.random.default_rng(1)
        self.step = 0
        self.values = torch.empty(SIZE)
        self.moments = torch.zeros(2, SIZE)
        for name, value in self.view().items():
            is_norm = value.dim() == 1
            normal = random.standard_normal(value.shape) * value.shape[-1] ** -0.5
            value.copy_(torch.ones(()) if is_norm else torch.from_numpy(normal))

    def view(self):
        """{name: tensor} in the memory of `values`: leaves of autograd of their own."""
        parts = self.values.split([int(numpy.prod(shape)) for shape in SHAPES.values()])
        return {name: part.view(SHAPES[name]) for name, part in zip(SHAPES, parts)}

    def adam(self, gradient):
        self.step += 1
        first, second = self.moments
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        size = (second / (1 - 0.99**self.step)).sqrt_().add_(1e-8)
        self.values.addcdiv_(first, size, value=-LEARNING_RATE / (1 - 0.9**self.step))

    def save(self, file):
        with open(file, "wb") as out:
            out.write(struct.pack("=q", self.step))
            for tensor in (self.values, self.moments):
                out.write(tensor.numpy().tobytes())

    def load(self, file):
        data = open(file, "rb").read()
        if len(data) != 8 + 3 * 4 * SIZE:
            raise SystemExit(f"{file}: {len(data)} bytes, expected {8 + 12 * SIZE}")
        (self.step,) = struct.unpack("=q", data[:8])
        numbers = torch.from_numpy(numpy.frombuffer(data[8:], "float32").copy())
        self.values, self.moments = numbers[:SIZE], numbers[SIZE:].view(2, SIZE)


def make_batch(paragraphs, num_tokens, step):
    """Bytes and cumulative lengths of one pack: paragraphs in a random order, the last one cut."""
    random = numpy.random.default_rng((2, step))
    tokens, cu_seqlens = b"", [0]
    while len(tokens) < num_tokens:
        tokens += paragraphs[random.integers(len(paragraphs))][: num_tokens - len(tokens)]
        cu_seqlens.append(len(tokens))
    return numpy.frombuffer(tokens, "uint8").astype("int64"), cu_seqlens


def rope_table(num_tokens):
    """cos, sin [positions, 1, HEAD_DIM / 2] of all positions there can be."""
    frequencies = 10000.0 ** (-numpy.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = numpy.arange(num_tokens)[:, None, None] * frequencies
    return [torch.from_numpy(f(angles).astype("float32")) for f in (numpy.cos, numpy.sin)]


def rotate(x, cos, sin):
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def before_attention(x, p, cos, sin, layer):
    """q, k, v of a leaf's rows."""
    qkv = F.linear(norm(x, p[f"{layer}.norm1"]), p[f"{layer}.qkv"]).unflatten(-1, (-1, HEAD_DIM))
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(x, attended, p, layer):
    x = x + F.linear(attended.flatten(1), p[f"{layer}.out"])
    gate, up = F.linear(norm(x, p[f"{layer}.norm2"]), p[f"{layer}.up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, p[f"{layer}.down"])


def train_step(parameters, group, tokens, cu_seqlens, table):
    """One step of Adam; the mean loss of the batch before it. Collective."""
    deal = cpattn.Sharding(cu_seqlens=cu_seqlens, group=group, chunk_tokens=CHUNK_TOKENS)
    leaves = deal.leaves()
    targets = deal.next_token_targets(tokens)
    num_targets = len(tokens) - len(cu_seqlens) + 1  # the last token of a document has none

    def split(rows):
        return [rows[leaf.begin : leaf.end] for leaf in leaves]

    views = [parameters.view() for _ in leaves]
    for view in views:
        for value in view.values():
            value.requires_grad_()
    positions = split(torch.from_numpy(deal.positions()))
    cos, sin = ([part[rows] for rows in positions] for part in table)
    ids = split(torch.from_numpy(deal.shard(tokens)))
    hidden = [F.embedding(rows, view["embedding"]) for rows, view in zip(ids, views)]
    idle = []  # what a rank without rows differentiates, to take part in what the others do
    for layer in range(LAYERS):
        parts = [before_attention(*leaf, layer) for leaf in zip(hidden, views, cos, sin)]
        q, k, v = (torch.cat(part) for part in zip(*parts)) if parts else no_rows()
        attended = cpattn.torch.context_parallel_attention(
            q, k, v, cu_seqlens=cu_seqlens, group=group, chunk_tokens=CHUNK_TOKENS
        )
        hidden = [after_attention(*leaf, layer) for leaf in zip(hidden, split(attended), views)]
        idle.append(attended.sum())
    losses = [
        F.cross_entropy(F.linear(norm(x, view["norm"]), view["embedding"]), rows, reduction="sum")
        for x, rows, view in zip(hidden, split(torch.from_numpy(targets)), views)
    ]
    torch.autograd.backward([loss / num_targets for loss in losses] or idle)

    total = cpattn.OrderedSum(deal.num_leaves, SIZE + 1, group=group)
    for leaf, view, loss in zip(leaves, views, losses):
        gradients = [value.grad.flatten() for value in view.values()]
        total.add(leaf.leaf, torch.cat((*gradients, loss.detach().view(1))))
    result = torch.from_numpy(total.all_reduce())
    parameters.adam(result[:SIZE])
    return result[SIZE] / num_targets


def no_rows():
    """q, k, v of a rank that has none."""
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        yield torch.empty(0, heads, HEAD_DIM, requires_grad=True)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--text", default=os.path.join(here, "..", "..", "tests", "data", "text.txt")
    )
    parser.add_argument("--steps", type=int, default=8, help="of the whole run (default: 8)")
    parser.add_argument("--tokens", type=int, default=640, help="of a batch (default: 640)")
    parser.add_argument("--save-at", nargs=2, metavar=("STEP", "FILE"), help="stop there and save")
    parser.add_argument("--resume", metavar="FILE", help="go on from a saved run")
    options = parser.parse_args()

    torch.set_num_threads(1)
    group = cpattn.world()
    paragraphs = [p for p in open(options.text, "rb").read().split(b"\n\n") if len(p) > 1]
    table = rope_table(options.tokens)
    parameters = Parameters()
    if options.resume:
        parameters.load(options.resume)
    last = int(options.save_at[0]) if options.save_at else options.steps
    loss = torch.zeros(())
    while parameters.step < last:
        batch = make_batch(paragraphs, options.tokens, parameters.step)
        loss = train_step(parameters, group, *batch, table)
        if group.rank == 0:
            print(f"step {parameters.step}  loss {loss:.6f}", flush=True)
    if group.rank == 0:
        if options.save_at:
            parameters.save(options.save_at[1])
        print(f"loss_hex=0x{loss.numpy().view('uint32'):08x}")


if __name__ == "__main__":
    main()
