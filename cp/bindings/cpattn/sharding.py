"""Which rank owns which tokens, and what follows from it outside the attention: rows of any tensor,
positions for RoPE, lengths, targets, and the leaves that token sums are made of."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import numpy

from cpattn import _cpattn
from cpattn._cpattn import InvalidArgumentError
from cpattn.attention import integers, mask_name, plain, problem_arguments
from cpattn.groups import GroupLike, complaint_of, group_of, seconds

IGNORE_TARGET = -100
"""What a cross-entropy takes for "no target"."""


class Leaf(NamedTuple):
    """Local rows [begin, end) are leaf `leaf` of an ordered sum over the tokens."""

    leaf: int
    begin: int
    end: int


class Sharding:
    """The deal of a pack of documents, seen from one rank of a group.

    Pure: the same arguments give the same deal everywhere, and the one that a plan of the same
    lengths and options has. Only `unshard` talks to the other ranks.

    Args:
        seq_len: tokens of one document; or
        cu_seqlens: [documents + 1] cumulative lengths, global, from 0.
        cu_seqlens_kv: those of the keys where they differ (as `of_keys=True` asks for below).
        group: as everywhere; None: the world.
        causal: as in the attention: it decides what makes ranks equally busy.
        sharding, chunk_tokens: as in the attention.
    Raises:
        InvalidArgumentError: lengths or options that are wrong.
    """

    def __init__(
        self,
        *,
        seq_len: Optional[int] = None,
        cu_seqlens: Any = None,
        cu_seqlens_kv: Any = None,
        group: GroupLike = None,
        causal: bool = True,
        sharding: str = "zigzag",
        chunk_tokens: int = 512,
    ):
        self.group = group_of(group)
        arguments = problem_arguments(
            num_heads=1,
            head_dim=1,
            seq_len=seq_len,
            cu_seqlens=cu_seqlens,
            cu_seqlens_kv=cu_seqlens_kv,
        )
        self._num_tokens = arguments.cu_seqlens_q[-1]
        self._num_keys = arguments.cu_seqlens_kv[-1]
        options = {
            "mask": mask_name(causal),
            "sharding": sharding,
            "chunk_tokens": plain(chunk_tokens),
        }
        self._core = _cpattn.Sharding(_cpattn.Problem(*arguments), options, self.group.size)

    def index(self, *, of_keys: bool = False, rank: Optional[int] = None) -> numpy.ndarray:
        """int64 [local rows]: the global row that each local row is."""
        return self._core.index(self._rank(rank), of_keys)

    def positions(self, *, of_keys: bool = False, rank: Optional[int] = None) -> numpy.ndarray:
        """int64 [local rows]: each row's position in its document, from 0: what RoPE rotates by.

        Where a document has more keys than queries (a prompt in pieces, a cache), a query's last
        key under a causal mask is at that position + keys - queries: what to rotate queries by.
        """
        return self._core.positions(self._rank(rank), of_keys)

    def local_cu_seqlens(
        self, *, of_keys: bool = False, rank: Optional[int] = None
    ) -> numpy.ndarray:
        """int64 [documents + 1]: cumulative numbers of rows this rank has of each document."""
        return self._core.local_cu_seqlens(self._rank(rank), of_keys)

    def next_token_targets(
        self, tokens: Any, *, ignore: int = IGNORE_TARGET, rank: Optional[int] = None
    ) -> numpy.ndarray:
        """int64 [local rows]: the token after each row in its document, whoever owns that one.

        Args:
            tokens: all tokens of the pack, [tokens] integers.
            ignore: the target of a document's last token.
        """
        return self._core.next_token_targets(integers("tokens", tokens), self._rank(rank), ignore)

    def leaves(self, *, rank: Optional[int] = None) -> List[Leaf]:
        """The chunks of this rank, numbered through all documents: what `ordered_sum` adds up."""
        return [Leaf(*leaf) for leaf in self._core.leaves(self._rank(rank))]

    @property
    def num_leaves(self) -> int:
        """Of all ranks together."""
        return self._core.num_leaves

    def shard(self, x: Any, *, of_keys: bool = False) -> Any:
        """This rank's rows of an array or tensor [tokens, ...] of any type: a copy."""
        expected = self._num_keys if of_keys else self._num_tokens
        if len(x) < expected:
            raise InvalidArgumentError(f"x: {len(x)} rows, expected {expected}")
        return x[self.index(of_keys=of_keys)]

    def unshard(self, x: Any, *, of_keys: bool = False, timeout: float = 60.0) -> Any:
        """All rows [tokens, ...] from every rank's [local rows, ...]. Collective.

        For checkpoints and tests: every rank holds everything afterwards.

        Raises:
            InvalidArgumentError: on every rank when a rank's rows do not fit or types differ.
        """
        complaint, lines, wait = "", "", 60.0
        try:
            wait = seconds(timeout)
            local = _bits(x)
            rows = len(self.index(of_keys=of_keys))
            if len(local) != rows:
                raise InvalidArgumentError(f"x: {len(local)} rows, expected {rows}")
            row_shape, kind = tuple(local.shape[1:]), f"{type(x).__name__} {x.dtype}"
            lines = f"of_keys={bool(of_keys)}\nrow shape={row_shape}\ntype={kind}\n"
        except Exception as error:
            complaint = complaint_of(error)
        self.group.agree(lines, complaint, wait)
        result = numpy.empty(
            (self._num_keys if of_keys else self._num_tokens, *row_shape), local.dtype
        )
        everybody = self.group.all_gather(numpy.ascontiguousarray(local).tobytes(), wait)
        for rank, data in enumerate(everybody):
            own = self.index(of_keys=of_keys, rank=rank)
            result[own] = numpy.frombuffer(data, local.dtype).reshape(len(own), *row_shape)
        return _like(x, result)

    def _rank(self, rank: Optional[int]) -> int:
        return self.group.rank if rank is None else rank


def _bits(x: Any) -> numpy.ndarray:
    """The rows of an array or tensor for numpy, which has no bfloat16."""
    if isinstance(x, numpy.ndarray):
        return x
    if not hasattr(x, "detach"):
        raise InvalidArgumentError(f"x: a {type(x).__name__}, expected a numpy array or a tensor")
    x = x.detach()
    is_bfloat16 = str(x.dtype) == "torch.bfloat16"
    return (x.contiguous().view(dtype=_torch().int16) if is_bfloat16 else x).numpy()


def _like(x: Any, result: numpy.ndarray) -> Any:
    if isinstance(x, numpy.ndarray):
        return result
    return _torch().from_numpy(result).view(dtype=x.dtype)


def _torch() -> Any:
    import torch

    return torch


class OrderedSum:
    """The sum of numbered arrays over all ranks, with the same bits whoever brings which.

    The order is a binary tree over the leaf numbers, added in the arrays' own type; a leaf that
    nobody brings is left out. A trainer's sums over tokens (weight gradients, a loss) are such
    sums: one partial sum per leaf of `Sharding.leaves`, and then this.

    Args:
        num_leaves: leaves are numbered from 0; of all ranks together.
        size: numbers in a leaf.
        dtype: "float32" or "float64".
        group: as everywhere; None: the world.
    """

    def __init__(
        self, num_leaves: int, size: int, *, dtype: Any = "float32", group: GroupLike = None
    ):
        name = _cpattn.dtype_name(dtype)
        kinds: Dict[str, Any] = {
            "float32": _cpattn.OrderedSumFloat32,
            "float64": _cpattn.OrderedSumFloat64,
        }
        if name not in kinds:
            raise InvalidArgumentError(f"dtype: {name}, expected {' | '.join(kinds)}")
        self._size, self._dtype = size, name
        self._core = kinds[name](group_of(group), num_leaves, size)

    def add(self, leaf: int, values: Any) -> None:
        """Brings a leaf: a contiguous array or tensor of `size` numbers; copied.

        Raises nothing: what is wrong, `all_reduce` refuses on every rank.
        """
        try:
            self._core.add(leaf, values)
        except Exception as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self._core.refuse(complaint_of(error))

    def all_reduce(self, out: Any = None, *, timeout: float = 60.0) -> Any:
        """The sum of all leaves that any rank brought, on every rank; starts afresh. Collective.

        Args:
            out: contiguous, `size` numbers; written in place. None: a new numpy array.
        Raises:
            InvalidArgumentError: on every rank: what was wrong with a leaf or with `out` on any;
                sizes that differ; a leaf brought twice.
        """
        wait = 60.0
        try:
            wait = seconds(timeout)
            if out is None:
                out = numpy.empty(self._size, self._dtype)
        except Exception as error:
            self._refuse(error)
        self._core.all_reduce(out, wait)
        return out


def ordered_sum(
    partials: Any, leaves: Any, num_leaves: int, *, group: GroupLike = None, timeout: float = 60.0
) -> Any:
    """The sum over all ranks of `partials`, leaf `leaves[i]` being `partials[i]`. Collective.

    Args:
        partials: [leaves of this rank, ...], float32 or float64, an array or a tensor; the trailing
            shape is equal on all ranks.
        leaves: their numbers, or the `Leaf`s that `Sharding.leaves` gives.
        num_leaves: of all ranks together.
    Returns:
        An array or tensor [...] like a row of `partials`; see `OrderedSum` for its order.
    Raises:
        InvalidArgumentError: on every rank when a rank's arguments are wrong or sizes differ.
    """
    ranks = group_of(group)
    try:
        numbers = [leaf.leaf if isinstance(leaf, Leaf) else int(leaf) for leaf in leaves]
        rows = numpy.ascontiguousarray(_bits(partials))
        result = numpy.empty(rows.shape[1:], rows.dtype)
        total = OrderedSum(num_leaves, result.size, dtype=rows.dtype, group=ranks)
        if len(numbers) != len(rows):
            raise InvalidArgumentError(f"leaves: {len(numbers)} numbers, expected {len(rows)}")
    except Exception as error:
        nothing = OrderedSum(0, 0, group=ranks)  # takes part only to refuse
        nothing._refuse(error)
        nothing.all_reduce()
        raise  # not reached: refusing raises
    for number, row in zip(numbers, rows):
        total.add(number, row)
    total.all_reduce(result, timeout=timeout)
    return _like(partials, result)
