"""The compiled half of cpattn. What is public is exported, and documented, by the package."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy
from numpy.typing import NDArray

__version__: str
has_mpi: bool

class Error(Exception):
    """What cpattn raises derives from this."""

class InvalidArgumentError(Error, ValueError):
    """The caller passed something wrong. Nothing was exchanged; everything can be used again."""

class UnsupportedError(Error, NotImplementedError):
    """A part that was not compiled in, or that this machine does not have."""

class CommError(Error, RuntimeError):
    """A peer or the network failed, or a deadline passed: the group must not be used again."""

class DeviceError(Error, RuntimeError):
    """A call of CUDA failed: a GPU or its driver."""

class InternalError(Error, RuntimeError):
    """A bug of cpattn."""

class Group:
    """Ranks that share a sequence. Belongs to one thread at a time."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transport(self) -> str:
        """ "self" or "mpi"; of GPUs "nccl", "mpi, staged", ..."""

    @property
    def device(self) -> str:
        """Where this rank's arrays are: "cpu", "cuda:0", ..."""

    @property
    def local_ranks(self) -> int:
        """Ranks of the group on this host."""

    def agree(self, lines: str, complaint: str = ..., timeout: float = ...) -> None:
        """Collective: InvalidArgumentError on all ranks when any has a complaint, or when the
        key=value lines differ."""

    def all_gather(self, data: bytes, timeout: float = ...) -> List[bytes]:
        """Collective: everybody's bytes, by rank. InvalidArgumentError on all ranks when any passes
        something else."""

    def max_over_ranks(self, values: Any, stream: Any = ..., timeout: Any = ...) -> None: ...

def cuda_group(
    ranks: Group,
    device: Any,
    exchange: Any,
    nccl_comm: Any,
    backend: Any,
    allocator: Any,
    timeout: Any,
) -> Group: ...
def self_group() -> Group: ...
def world_group() -> Group: ...
def group_at(address: int) -> Group: ...
def mpi_version() -> str: ...
def is_mpi_running() -> bool: ...
def has_comm_failed() -> bool: ...

class MpiSession:
    """MPI_Init_thread now, MPI_Finalize when it goes."""

    def __init__(self) -> None: ...
    def give_up(self) -> None:
        """Leave without the finalize that waits for all ranks."""

class Problem:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        softmax_scale: float,
        cu_seqlens_q: Sequence[int],
        cu_seqlens_kv: Sequence[int],
        dtype: Any,
        out_dtype: Any,
    ) -> None: ...

class Plan:
    def refuse(self, complaint: str) -> None: ...
    def forward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, head_maxima: Any, stream: Any
    ) -> None: ...
    def prepare_backward(self) -> None: ...
    def reset_head_maxima(self, head_maxima: Any, stream: Any) -> None: ...
    def shard_rows(self, x: Any, out: Any, of_keys: bool, stream: Any) -> None: ...
    def unshard_rows(self, x: Any, out: Any, of_keys: bool, stream: Any) -> None: ...
    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dout: Any,
        dlse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        stream: Any,
    ) -> None: ...
    @property
    def q_rows(self) -> int: ...
    @property
    def kv_rows(self) -> int: ...
    @property
    def q_index(self) -> NDArray[numpy.int64]: ...
    @property
    def kv_index(self) -> NDArray[numpy.int64]: ...
    @property
    def kernels(self) -> str: ...
    @property
    def guarantee(self) -> str: ...

class Attention:
    def __init__(self, group: Group, options: Dict[str, Any], isa: Optional[str]) -> None: ...
    def plan(self, problem: Problem) -> Plan: ...
    def refuse_plan(self, why: str) -> None: ...
    def explain(self, problem: Problem) -> str: ...
    @property
    def options(self) -> Dict[str, Any]: ...

class Sharding:
    def __init__(self, problem: Problem, options: Dict[str, Any], world_size: int) -> None: ...
    def index(self, rank: int, of_keys: bool) -> NDArray[numpy.int64]: ...
    def positions(self, rank: int, of_keys: bool) -> NDArray[numpy.int64]: ...
    def local_cu_seqlens(self, rank: int, of_keys: bool) -> NDArray[numpy.int64]: ...
    def next_token_targets(
        self, tokens: Sequence[int], rank: int, ignore: int
    ) -> NDArray[numpy.int64]: ...
    def leaves(self, rank: int) -> List[Tuple[int, int, int]]: ...
    @property
    def num_leaves(self) -> int: ...

class OrderedSumFloat32:
    def __init__(self, group: Group, num_leaves: int, size: int) -> None: ...
    def add(self, leaf: int, values: Any) -> None: ...
    def refuse(self, why: str) -> None: ...
    def all_reduce(self, result: Any, timeout: float = ...) -> None: ...

class OrderedSumFloat64:
    def __init__(self, group: Group, num_leaves: int, size: int) -> None: ...
    def add(self, leaf: int, values: Any) -> None: ...
    def refuse(self, why: str) -> None: ...
    def all_reduce(self, result: Any, timeout: float = ...) -> None: ...

def dtype_name(dtype: Any) -> str: ...
def reference_forward(
    problem: Problem, causal: bool, q: Any, k: Any, v: Any, threads: int
) -> Tuple[NDArray[numpy.float64], NDArray[numpy.float64]]: ...
def reference_backward(
    problem: Problem, causal: bool, q: Any, k: Any, v: Any, dout: Any, dlse: Any, threads: int
) -> Tuple[NDArray[numpy.float64], NDArray[numpy.float64], NDArray[numpy.float64]]: ...
