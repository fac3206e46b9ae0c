"""Attention over a sequence that several ranks share, with bits that do not depend on the split.

    import cpattn

    group = cpattn.world()  # the ranks that mpirun started, or this process alone
    deal = cpattn.Sharding(seq_len=4096, group=group)
    plan = cpattn.Attention(group).plan(seq_len=4096, num_heads=8, num_kv_heads=2, head_dim=64)
    out, lse = plan.forward(deal.shard(q), deal.shard(k), deal.shard(v))  # this rank's rows

Works with numpy alone; `cpattn.torch` (imported by `import cpattn.torch`) is the part that needs
PyTorch. Arrays are looked at through the buffer protocol, DLPack or the CUDA array interface:
nothing is copied. Groups whose arrays are on GPUs are made by `cuda_group`.
"""

from cpattn._cpattn import (
    CommError,
    DeviceError,
    Error,
    InternalError,
    InvalidArgumentError,
    UnsupportedError,
    __version__,
)
from cpattn.attention import Attention, Plan
from cpattn.groups import Group, cuda_group, max_over_ranks, self_group, world
from cpattn.sharding import IGNORE_TARGET, Leaf, OrderedSum, Sharding, ordered_sum

__all__ = [
    "Attention",
    "CommError",
    "DeviceError",
    "Error",
    "Group",
    "IGNORE_TARGET",
    "InternalError",
    "InvalidArgumentError",
    "Leaf",
    "OrderedSum",
    "Plan",
    "Sharding",
    "UnsupportedError",
    "__version__",
    "cuda_group",
    "max_over_ranks",
    "ordered_sum",
    "self_group",
    "world",
]
