"""Attention and Plan: a group and a configuration; one planned problem.

Rows. A global tensor has all tokens of all documents; this rank's *shard* has the rows
`plan.q_index` (queries) and `plan.kv_index` (keys, values) of it, in that order. Shapes below are
those of the shard: q [q_rows, num_heads, head_dim], k [kv_rows, num_kv_heads, head_dim], v
[kv_rows, num_kv_heads, value_dim].
"""

from __future__ import annotations

import math
import os
from typing import Any, Optional, Sequence, Tuple

import numpy

from cpattn import _cpattn
from cpattn._cpattn import InvalidArgumentError
from cpattn.groups import GroupLike, group_of


def lengths(name: str, value: Any) -> Optional[Tuple[int, ...]]:
    """Cumulative lengths as a tuple of int, from a sequence, an array or a tensor."""
    if value is None:
        return None
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, (list, tuple)):
        raise InvalidArgumentError(f"{name}: {value!r}, expected a sequence of integers")
    for i, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int):
            is_number = isinstance(item, numpy.integer)
            if not is_number:
                raise InvalidArgumentError(f"{name}[{i}]: {item!r}, expected an integer")
    return tuple(int(item) for item in items)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, numpy.integer)):
        raise InvalidArgumentError(f"{name}: {value!r}, expected an integer")
    return int(value)


def default_threads(group: _cpattn.Group) -> int:
    """The cores this process may use, shared with the group's other ranks on this host."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // max(1, group.local_ranks))


class Plan:
    """One planned problem: forward (and backward) for any number of layers of these shapes.

    Made by `Attention.plan`. One thread at a time; every call is collective over the group.
    """

    def __init__(self, core: _cpattn.Plan, shape: Tuple[int, int, int, int], out_dtype: str):
        self._core = core
        self._num_heads, self._num_kv_heads, self._head_dim, self._value_dim = shape
        self._out_dtype = out_dtype

    @property
    def q_rows(self) -> int:
        """Rows of q, out and lse on this rank."""
        return self._core.q_rows

    @property
    def kv_rows(self) -> int:
        """Rows of k and v on this rank."""
        return self._core.kv_rows

    @property
    def q_index(self) -> numpy.ndarray:
        """int64 [q_rows]: row of the global q that each row of the shard is."""
        return self._core.q_index

    @property
    def kv_index(self) -> numpy.ndarray:
        """int64 [kv_rows]: row of the global k, v that each row of the shard is."""
        return self._core.kv_index

    @property
    def options(self) -> dict:
        """Every option with its value."""
        return self._core.options

    @property
    def kernels(self) -> str:
        """The kernels in use, as "cpu/avx512"."""
        return self._core.kernels

    @property
    def guarantee(self) -> str:
        """"bitwise across CP sizes", or why not."""
        return self._core.guarantee

    def forward(self, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None) -> tuple:
        """Attention of this rank's queries over all keys of their documents. Collective.

        Args:
            q, k, v: arrays or tensors of the plan's dtype; any strides, but the last dimension
                contiguous. Read in place.
            out: [q_rows, num_heads, value_dim], the plan's out_dtype; written in place. None: a
                new numpy array.
            lse: float32 [q_rows, num_heads], natural log of the sum of exp(softmax_scale * q.k);
                -inf where a query sees no key (out is 0 there). None: a new numpy array.
        Returns:
            (out, lse): those given, or new ones.
        Raises:
            InvalidArgumentError: on every rank when any rank's arrays do not fit.
            CommError: a peer failed or is late.
        """
        if out is None:
            out = self._empty((self.q_rows, self._num_heads, self._value_dim), self._out_dtype)
        if lse is None:
            lse = numpy.empty((self.q_rows, self._num_heads), numpy.float32)
        self._core.forward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def _empty(shape: Tuple[int, ...], dtype: str) -> numpy.ndarray:
        if dtype != "bfloat16":
            return numpy.empty(shape, dtype)
        try:
            import ml_dtypes
        except ImportError:
            raise InvalidArgumentError(
                "out: numpy has no bfloat16: pass tensors to write to, choose another out_dtype, "
                "or install ml_dtypes"
            ) from None
        return numpy.empty(shape, ml_dtypes.bfloat16)


class Attention:
    """A group of ranks and a configuration.

    Args:
        group: `cpattn.world()`, `cpattn.self_group()`, an mpi4py communicator; None: the world.
        causal: whether a query sees only keys up to its own place (bottom-right aligned when a
            document has more keys than queries).
        options: the knobs of docs/configuration.md by their YAML names: sharding, schedule,
            chunk_tokens, threads (default: this host's cores divided among its ranks), timeout,
            max_message_bytes, verify_checksum, shuffle_arrival.
        isa: "generic", "avx2", ...; None: the best this machine has.
    Raises:
        InvalidArgumentError: an unknown option or a value of the wrong type.
    """

    def __init__(
        self, group: GroupLike = None, *, causal: bool = True, isa: Optional[str] = None, **options
    ):
        if not isinstance(causal, bool):
            raise InvalidArgumentError(f"causal: {causal!r}, expected True or False")
        self.group = group_of(group)
        self._isa = isa
        self._options = {**options, "mask": "causal" if causal else "full"}
        if not self._options.get("threads"):
            self._options["threads"] = default_threads(self.group)
        _cpattn.check_options(self._options)

    def plan(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: Optional[int] = None,
        value_dim: Optional[int] = None,
        softmax_scale: Optional[float] = None,
        seq_len: Optional[int] = None,
        cu_seqlens: Optional[Sequence[int]] = None,
        cu_seqlens_kv: Optional[Sequence[int]] = None,
        dtype: Any = "float32",
        out_dtype: Any = None,
    ) -> Plan:
        """Decides and allocates all that forward and backward need. Collective.

        Args:
            num_heads, num_kv_heads: query head h reads kv head h // (num_heads // num_kv_heads).
            head_dim, value_dim: channels of q, k and of v; up to 256.
            softmax_scale: None: 1 / sqrt(head_dim).
            seq_len: tokens of one document; or
            cu_seqlens: [documents + 1] cumulative lengths of packed documents, *global*, from 0.
            cu_seqlens_kv: those of the keys where they differ.
            dtype: of q, k, v: "float32", "float16", "bfloat16", or numpy's or torch's own names.
            out_dtype: of out; None: dtype.
        Raises:
            InvalidArgumentError: on every rank when a rank's arguments are wrong or differ.
        """
        if (seq_len is None) == (cu_seqlens is None):
            raise InvalidArgumentError("expected one of seq_len and cu_seqlens")
        if seq_len is not None:
            cu_q: Any = (0, _count("seq_len", seq_len))
        else:
            cu_q = lengths("cu_seqlens", cu_seqlens)
        cu_kv = cu_q if cu_seqlens_kv is None else lengths("cu_seqlens_kv", cu_seqlens_kv)
        shape = (
            _count("num_heads", num_heads),
            _count("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads),
            _count("head_dim", head_dim),
            _count("value_dim", head_dim if value_dim is None else value_dim),
        )
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(max(shape[2], 1))
        out_dtype = dtype if out_dtype is None else out_dtype
        core = _cpattn.Plan(
            self.group,
            self._options,
            self._isa,
            _cpattn.Shape(*shape, softmax_scale),
            cu_q,
            cu_kv,
            dtype,
            out_dtype,
        )
        return Plan(core, shape, _cpattn.dtype_name(out_dtype))
