"""Attention and Plan: a group and a configuration; one planned problem.

Rows. A global tensor has all tokens of all documents; this rank's *shard* has the rows
`plan.q_index` (queries) and `plan.kv_index` (keys, values) of it, in that order. Shapes below are
those of the shard: q [q_rows, num_heads, head_dim], k [kv_rows, num_kv_heads, head_dim], v
[kv_rows, num_kv_heads, value_dim].
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy

from cpattn import _cpattn
from cpattn._cpattn import InvalidArgumentError
from cpattn.groups import GroupLike, complaint_of, group_of


def integers(name: str, value: Any) -> Tuple[int, ...]:
    """A tuple of int from a sequence, an array or a tensor; nothing else is rounded to one."""
    if isinstance(value, numpy.ndarray) and value.ndim == 1 and value.dtype.kind == "i":
        return tuple(value.tolist())
    items = value.tolist() if hasattr(value, "tolist") else value
    if "float" in str(getattr(value, "dtype", "")):
        raise InvalidArgumentError(f"{name}: {items} of {value.dtype}, expected integers")
    if not isinstance(items, (list, tuple)):
        raise InvalidArgumentError(f"{name}: {value!r}, expected a sequence of integers")
    return tuple(_integer(f"{name}[{i}]", item) for i, item in enumerate(items))


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, numpy.integer)):
        raise InvalidArgumentError(f"{name}: {value!r}, expected an integer")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise InvalidArgumentError(f"{name}: {number}, expected a 64-bit integer")
    return number


def plain(value: Any) -> Any:
    """numpy's own numbers and booleans as Python's."""
    return value.item() if isinstance(value, numpy.generic) else value


def number(name: str, value: Any) -> float:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentError(f"{name}: {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{name}: {value}, expected a finite number") from None


def mask_name(causal: Any) -> str:
    causal = plain(causal)
    if not isinstance(causal, bool):
        raise InvalidArgumentError(f"causal: {causal!r}, expected True or False")
    return "causal" if causal else "full"


def default_threads(group: _cpattn.Group) -> int:
    """The cores this process may use, shared with the group's other ranks on this host."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // max(1, group.local_ranks))


class ProblemArguments(NamedTuple):
    """What a caller says of a problem, checked one by one; `_cpattn.Problem` takes it as it is."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    softmax_scale: float
    cu_seqlens_q: Tuple[int, ...]
    cu_seqlens_kv: Tuple[int, ...]
    dtype: str
    out_dtype: str


def problem_arguments(
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: Optional[int] = None,
    value_dim: Optional[int] = None,
    softmax_scale: Optional[float] = None,
    seq_len: Optional[int] = None,
    cu_seqlens: Any = None,
    cu_seqlens_kv: Any = None,
    dtype: Any = "float32",
    out_dtype: Any = None,
) -> ProblemArguments:
    """The arguments of `Attention.plan`, as they are documented there, with defaults filled in."""
    if (seq_len is None) == (cu_seqlens is None):
        raise InvalidArgumentError("seq_len, cu_seqlens: expected one of them")
    cu_q = (
        integers("cu_seqlens", cu_seqlens) if seq_len is None else (0, _integer("seq_len", seq_len))
    )
    head_dim = _integer("head_dim", head_dim)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(head_dim, 1))
    return ProblemArguments(
        num_heads=_integer("num_heads", num_heads),
        num_kv_heads=_integer("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=head_dim,
        value_dim=_integer("value_dim", head_dim if value_dim is None else value_dim),
        softmax_scale=number("softmax_scale", softmax_scale),
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_q if cu_seqlens_kv is None else integers("cu_seqlens_kv", cu_seqlens_kv),
        dtype=_cpattn.dtype_name(dtype),
        out_dtype=_cpattn.dtype_name(dtype if out_dtype is None else out_dtype),
    )


class Plan:
    """One planned problem: forward (and backward) for any number of layers of these shapes.

    Made by `Attention.plan`. One thread at a time; every call is collective over the group.
    """

    def __init__(self, core: _cpattn.Plan, problem: ProblemArguments, device: str):
        self._core = core
        self._problem = problem
        self._device = device

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
    def kernels(self) -> str:
        """The kernels in use, as "cpu/avx512"."""
        return self._core.kernels

    @property
    def guarantee(self) -> str:
        """ "bitwise across CP sizes", or why not."""
        return self._core.guarantee

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        lse: Any = None,
        head_maxima: Any = None,
        stream: Optional[int] = None,
    ) -> tuple:
        """Attention of this rank's queries over all keys of their documents. Collective.

        Args:
            q, k, v: arrays or tensors of the plan's dtype; any strides, but the last dimension
                contiguous. Read in place.
            out: [q_rows, num_heads, value_dim], the plan's out_dtype; written in place. None: a
                new numpy array.
            lse: float32 [q_rows, num_heads], natural log of the sum of exp(softmax_scale * q.k);
                -inf where a query sees no key (out is 0 there). None: a new numpy array.
            head_maxima: float32 [num_heads], contiguous, or None; head_maxima[h] becomes the larger
                of what it was and the largest visible softmax_scale * q.k of head h over this
                rank's rows. Begin with `reset_head_maxima`; `cpattn.max_over_ranks` makes it the
                group's.
            stream: of a `cuda_group`, the handle of the CUDA stream in whose order the work is
                done, later than this returns; it may be in capture. None, 0 or 1: the default
                stream. Arrays must stay until the work is done, or be given back in the order of
                that stream, as torch and CuPy do. On a GPU out and lse must be given.
        Returns:
            (out, lse): those given, or new ones.
        Raises:
            InvalidArgumentError: on every rank when any rank's arrays do not fit.
            CommError: a peer failed or is late.
        """
        problem = self._problem
        try:
            self._require_given(out=out, lse=lse)
            if out is None:
                out = _empty(
                    "out", (self.q_rows, problem.num_heads, problem.value_dim), problem.out_dtype
                )
            if lse is None:
                lse = numpy.empty((self.q_rows, problem.num_heads), numpy.float32)
        except Exception as error:
            self._core.refuse(complaint_of(error))
            raise  # not reached: refusing raises
        self._core.forward(q, k, v, out, lse, head_maxima, stream)
        return out, lse

    def prepare_backward(self) -> None:
        """Takes the backward's memory now, not in the first backward, which without this is refused
        in a capture. Collective."""
        self._core.prepare_backward()

    def reset_head_maxima(self, head_maxima: Any, *, stream: Optional[int] = None) -> None:
        """Makes `head_maxima`, float32 [num_heads], "nothing observed", -inf: in place; on a GPU in
        the order of `stream`, which may be in capture. Not collective."""
        self._core.reset_head_maxima(head_maxima, stream)

    def shard_rows(
        self, x: Any, out: Any, *, of_keys: bool = False, stream: Optional[int] = None
    ) -> Any:
        """This rank's rows of a whole array, copied where the group's arrays are. Not collective.

        Args:
            x: [tokens, heads, channels], with all rows; float32, float16 or bfloat16; any strides,
                but the last dimension contiguous.
            out: [q_rows, heads, channels] of x's dtype; written in place.
            of_keys: rows of k and v instead, [kv_rows, ...].
            stream: as in forward. The first call for a side takes a little memory, so in a capture
                it is refused.
        Returns: out.
        Raises:
            InvalidArgumentError: an array does not fit, or is elsewhere.
        """
        self._core.shard_rows(x, out, of_keys, stream)
        return out

    def unshard_rows(
        self, x: Any, out: Any, *, of_keys: bool = False, stream: Optional[int] = None
    ) -> Any:
        """The way back: this rank's rows of `out`, [tokens, heads, channels], become those of `x`,
        [q_rows, heads, channels]; the others keep what they have. Arguments as in `shard_rows`; to
        have the rows of all ranks, see `Sharding.unshard`."""
        self._core.unshard_rows(x, out, of_keys, stream)
        return out

    def _require_given(self, **outputs: Any) -> None:
        if self._device == "cpu":
            return
        for name, output in outputs.items():
            if output is None:
                raise InvalidArgumentError(
                    f"{name}: None, expected an array in memory of {self._device} to write to"
                )

    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dout: Any,
        *,
        dlse: Any = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        stream: Optional[int] = None,
    ) -> tuple:
        """Gradients of this rank's rows of q, k and v. Collective.

        Args:
            q, k, v: as given to forward.
            out, lse: as forward left them.
            dout: gradient of out, [q_rows, num_heads, value_dim], out's dtype or float32.
            dlse: gradient of lse, float32 [q_rows, num_heads]; None: zeros.
            dq, dk, dv: shaped as q, k, v; float32, float16 or bfloat16; written in place, and
                overlapping nothing else. None: new numpy arrays of the plan's dtype.
            stream: as in forward. On a GPU dq, dk and dv must be given; the first call of a plan
                takes its memory, so in a capture it is refused unless `prepare_backward` was
                called before.
        Returns:
            (dq, dk, dv): those given, or new ones.
        Raises:
            InvalidArgumentError: on every rank when any rank's arrays do not fit.
            CommError: a peer failed or is late.
        """
        problem = self._problem
        kv_shape = (self.kv_rows, problem.num_kv_heads)
        try:
            self._require_given(dq=dq, dk=dk, dv=dv)
            if dq is None:
                dq = _empty("dq", (self.q_rows, problem.num_heads, problem.head_dim), problem.dtype)
            if dk is None:
                dk = _empty("dk", (*kv_shape, problem.head_dim), problem.dtype)
            if dv is None:
                dv = _empty("dv", (*kv_shape, problem.value_dim), problem.dtype)
        except Exception as error:
            self._core.refuse(complaint_of(error))
            raise  # not reached: refusing raises
        self._core.backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, stream)
        return dq, dk, dv


def _empty(name: str, shape: Tuple[int, ...], dtype: str) -> numpy.ndarray:
    if dtype != "bfloat16":
        return numpy.empty(shape, dtype)
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidArgumentError(
            f"{name}: numpy has no bfloat16: pass a tensor to write to, choose another dtype, or "
            "install ml_dtypes"
        ) from None
    return numpy.empty(shape, ml_dtypes.bfloat16)


class Attention:
    """A group of ranks and a configuration.

    Args:
        group: `cpattn.world()`, `cpattn.self_group()`, an mpi4py communicator; None: the world. Of
            `cpattn.cuda_group(...)`, whose arrays are on GPUs.
        causal: whether a query sees only keys up to its own place (bottom-right aligned when a
            document has more keys than queries).
        options: the knobs of docs/configuration.md by their YAML names: sharding, schedule,
            chunk_tokens, threads (default: this host's cores divided among its ranks), timeout,
            verify_checksum, shuffle_arrival. (max_message_bytes is the group's: where messages are
            cut, `plan` refuses another value than the default. `mask` is refused: it is `causal`.)
        isa: "generic", "avx2", ...; None: the best this machine has. None on a GPU, where `threads`
            means nothing.
    Raises:
        InvalidArgumentError: an unknown option or a value of the wrong type.
    """

    def __init__(
        self, group: GroupLike = None, *, causal: bool = True, isa: Optional[str] = None, **options
    ):
        mask = mask_name(causal)
        if "mask" in options:
            raise InvalidArgumentError(f"mask: {options['mask']!r}, expected causal=True or False")
        self.group = group_of(group)
        options = {name: plain(value) for name, value in options.items()}
        options["mask"] = mask
        if not options.get("threads"):
            options["threads"] = default_threads(self.group)
        self._core = _cpattn.Attention(self.group, options, isa)

    @property
    def options(self) -> Dict[str, Any]:
        """Every option with its value."""
        return self._core.options

    def plan(self, **problem: Any) -> Plan:
        """Decides and allocates all that forward needs. Collective.

        Args:
            num_heads, num_kv_heads: query head h reads kv head h // (num_heads // num_kv_heads).
                num_kv_heads None: num_heads.
            head_dim, value_dim: channels of q, k and of v; up to 256. value_dim None: head_dim.
            softmax_scale: None: 1 / sqrt(head_dim).
            seq_len: tokens of one document; or
            cu_seqlens: [documents + 1] cumulative lengths of packed documents, *global*, from 0.
            cu_seqlens_kv: those of the keys where they differ.
            dtype: of q, k, v: "float32", "float16", "bfloat16", or numpy's or torch's own names.
            out_dtype: of out; None: dtype.
        Raises:
            InvalidArgumentError: on every rank when a rank's arguments are wrong, unknown or
                differ.
        """
        try:
            arguments = problem_arguments(**problem)
            _cpattn.Problem(*arguments)
        except Exception as error:
            self._core.refuse_plan(complaint_of(error))
            raise  # not reached: refusing raises
        return self.make(arguments)

    def make(self, arguments: ProblemArguments) -> Plan:
        """The plan of arguments that no rank refuses. Collective."""
        return Plan(self._core.plan(_cpattn.Problem(*arguments)), arguments, self.group.device)

    def explain(self, **problem: Any) -> Dict[str, Any]:
        """What would run and why, or why not, without doing it. Not collective.

        Args: those of `plan`.
        Returns: is_supported, refusals, kernels, guarantee, memory, bytes on the wire, ...: the
            names of C++'s `Explanation`. A problem that cannot be stated raises, as in `plan`.
        """
        core_problem = _cpattn.Problem(*problem_arguments(**problem))
        return json.loads(self._core.explain(core_problem))
