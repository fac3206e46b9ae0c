#!/usr/bin/env python3
"""cpattn against PyTorch's scaled_dot_product_attention on this CPU, or on a GPU: seconds and ratio
per case.

Both run in one process with the same number of threads on the same numbers, each in the layout it
likes best ([tokens, heads, channels] here, [1, heads, tokens, channels] there), in turns, so that a
machine that slows down slows down both. A time is the median of the turns; forward+backward is one
call and the gradients of q, k and v. A ratio above 1 says that cpattn is faster.

It needs a PyTorch of 2.0 or newer, in an environment of its own (from the root of the repository):

    python3 -m venv build/bench-venv
    build/bench-venv/bin/pip install torch .
    build/bench-venv/bin/python tests/perf/bench_torch.py --threads 1 --json build/bench_torch.json

With --device cuda it needs a PyTorch that has CUDA, and nvcc and NCCL when cpattn is installed.
That has not been run yet.
"""

import argparse
import json
import os
import statistics
import sys
import time

# Two OpenMP runtimes share the cores (PyTorch brings its own): the idle one must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F

import cpattn
import cpattn.torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def ours(q, k, v, causal, options):
    return cpattn.torch.context_parallel_attention(
        q, k, v, causal=causal, group=options.group, **options.knobs
    )


def theirs(q, k, v, causal, options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def wait(options):
    """Until the device has done all it was given."""
    if options.device == "cuda":
        torch.cuda.synchronize()


class Contender:
    def __init__(self, attend, tensors, dout, causal, options):
        self.attend, self.dout = attend, dout
        self.tensors, self.settings, self.options = tensors, (causal, options), options
        self.seconds = {"forward": [], "forward+backward": []}

    def run(self, direction):
        """One timed turn; out, and the gradients there are."""
        is_training = direction != "forward"
        for tensor in self.tensors:
            tensor.grad = None
            tensor.requires_grad_(is_training)
        wait(self.options)
        started = time.perf_counter()
        out = self.attend(*self.tensors, *self.settings)
        if is_training:
            out.backward(self.dout)
        wait(self.options)
        self.seconds[direction].append(time.perf_counter() - started)
        return [out.detach()] + ([t.grad for t in self.tensors] if is_training else [])

    def median(self, direction):
        return statistics.median(self.seconds[direction])


def distance(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


def measure(dtype, dim, tokens, causal, options):
    """Records of both directions of one case."""
    torch.manual_seed(tokens + dim)
    q, k, v, dout = (
        torch.randn(tokens, options.heads, dim).to(DTYPES[dtype]).to(options.device)
        for _ in range(4)
    )
    moved = [x.transpose(0, 1).contiguous()[None] for x in (q, k, v, dout)]
    contenders = (
        Contender(ours, [q, k, v], dout, causal, options),
        Contender(theirs, moved[:3], moved[3], causal, options),
    )
    for direction in ("forward", "forward+backward"):
        results = [contender.run(direction) for contender in contenders]  # and warm
        # Each is off by its type's roundings, an f32 sum of `tokens` terms at most by that many.
        limit = max(2 * torch.finfo(DTYPES[dtype]).eps, tokens * torch.finfo(torch.float32).eps)
        for mine, other in zip(*results):
            off = distance(mine, other[0].transpose(0, 1))
            if not off < limit:
                raise SystemExit(f"the two do not compute the same: {off:.3g} apart")
        for contender in contenders:
            contender.seconds[direction].clear()
        for _ in range(options.turns):
            for contender in contenders:
                contender.run(direction)
        mine, other = (contender.median(direction) for contender in contenders)
        yield {
            "dtype": dtype,
            "head_dim": dim,
            "tokens": tokens,
            "mask": "causal" if causal else "full",
            "direction": direction,
            "cpattn_seconds": mine,
            "torch_seconds": other,
            "ratio": other / mine,
        }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", default="1024,2048,4096,8192")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--json", metavar="FILE", help="also write the records there")
    options = parser.parse_args()
    if not hasattr(F, "scaled_dot_product_attention"):
        raise SystemExit(
            f"torch {torch.__version__} has no scaled_dot_product_attention: see --help"
        )
    torch.set_num_threads(options.threads)
    options.group, options.knobs = cpattn.self_group(), {"threads": options.threads}
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"torch {torch.__version__} sees no GPU: --device cuda is not run")
        options.group = cpattn.cuda_group(options.group, device=0)
        options.knobs = {"chunk_tokens": 4096}

    machine = {
        "torch": torch.__version__,
        "cpattn": cpattn.__version__,
        "kernels": cpattn.Attention(options.group).explain(
            seq_len=1, num_heads=1, head_dim=1
        )["kernels"],
        "threads": options.threads,
        "heads": options.heads,
        "turns": options.turns,
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    print("dtype  dim  tokens  mask    direction         cpattn s  torch s   ratio")
    records = []
    for dtype in options.dtypes.split(","):
        for dim in map(int, options.dims.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                for causal in (True, False):
                    for r in measure(dtype, dim, tokens, causal, options):
                        records.append(r)
                        print(
                            f"{dtype:5}  {dim:3}  {tokens:6}  {r['mask']:6}  {r['direction']:16}  "
                            f"{r['cpattn_seconds']:8.4f}  {r['torch_seconds']:8.4f}  "
                            f"{r['ratio']:5.2f}",
                            flush=True,
                        )
    slower = sum(r["ratio"] <= 1 for r in records)
    print(f"{len(records)} cases, cpattn slower in {slower}")
    if options.json:
        with open(options.json, "w", encoding="ascii") as file:
            json.dump({"machine": machine, "cases": records}, file, indent=1)
            file.write("\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
