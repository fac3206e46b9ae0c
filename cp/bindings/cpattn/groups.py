"""Which ranks share a sequence: the world, an mpi4py communicator, or this process alone.

MPI is used as it is found. When mpi4py (or the program itself) initialised it, that is what is
used and the one who initialised it finalises it. Otherwise, started by mpirun, `world()`
initialises MPI and takes it down again when Python ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, Optional, Union

import numpy

from cpattn import _cpattn
from cpattn._cpattn import Error, InvalidArgumentError, UnsupportedError
from cpattn._cpattn import Group as _Group

GroupLike = Union[None, "_Group", Any]

# What launchers put into the environment of the processes they start.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE")
# Who says how many it started, the innermost first; torchrun's name alone is anybody's.
_COUNTED = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
    "WORLD_SIZE": "torchrun",
}

# The world's group, and the MPI session when it is ours. MPI itself is one per process.
_world: Optional[_Group] = None
_session: Optional["_cpattn.MpiSession"] = None
_self: Optional[_Group] = None
_keyval: Optional[int] = None


def _is_launched() -> bool:
    return any(name in os.environ for name in _LAUNCHED)


def _require_all_found(size: int) -> None:
    """Processes that were started together and do not find each other would each do the whole
    sequence alone, and nobody would notice."""
    for name, launcher in _COUNTED.items():
        started = os.environ.get(name, "")
        if not started.isdigit() or (launcher == "torchrun" and not _is_torchrun()):
            continue
        if int(started) > size:
            library = _cpattn.mpi_version().splitlines()[0] if _cpattn.has_mpi else "no MPI"
            raise UnsupportedError(
                f"{launcher} started {started} processes ({name}), of which cpattn ({library}) "
                f"finds {size}: start them with the mpirun of that MPI, or pass "
                "group=cpattn.self_group() where each is to work alone"
            )
        return


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _require_same_mpi() -> None:
    """Two MPI libraries in one process do not know each other's handles."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return
    theirs, ours = mpi.Get_library_version().strip("\0"), _cpattn.mpi_version().strip("\0")
    if theirs != ours:
        raise UnsupportedError(
            f"mpi4py uses {theirs.splitlines()[0]}, cpattn was built with "
            f"{ours.splitlines()[0]}: expected the same library; build both against one MPI"
        )


def _leave() -> None:
    """At the end of Python. A rank that failed must not wait for the others in MPI_Finalize."""
    global _session, _world
    if _session is None:
        return
    if getattr(sys, "last_type", None) is not None or _cpattn.has_comm_failed():
        _session.give_up()
    _world = None
    _session = None


def world() -> _Group:
    """All ranks that mpirun started; outside mpirun, this process alone.

    Collective at its first call. The same object every time.

    Raises:
        UnsupportedError: started together with processes that are not found: by torchrun, by srun
            or mpirun of another MPI, or built without MPI; or built with another MPI library than
            mpi4py's.
    """
    global _session, _world
    if _world is not None:
        return _world
    if not _cpattn.has_mpi:
        _require_all_found(1)
        return self_group()
    _require_same_mpi()
    if not _cpattn.is_mpi_running():
        if not _is_launched():
            _require_all_found(1)
            return self_group()
        _session = _cpattn.MpiSession()
        atexit.register(_leave)
    group = _cpattn.world_group()
    _require_all_found(group.size)
    _world = group
    return _world


def self_group() -> _Group:
    """A group of this process alone; uses no MPI. The same object every time."""
    global _self
    if _self is None:
        _self = _cpattn.self_group()
    return _self


def Group(comm: Any) -> _Group:  # noqa: N802 - reads as the constructor it is
    """The group of an mpi4py communicator: any subgroup, of intracommunicator kind.

    Collective over `comm` at the first call for it: the communicator is duplicated, so that our
    messages never meet yours. Kept with the communicator (as an MPI attribute) and freed when that
    is freed; the same object every time until then.

    Args:
        comm: `mpi4py.MPI.Comm`; or a group, which is returned as it is.
    Raises:
        InvalidArgumentError: for anything else, and for MPI.COMM_NULL.
    """
    if isinstance(comm, _Group):
        return comm
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise InvalidArgumentError(_not_a_group(comm))
    if comm == mpi.COMM_NULL:
        raise InvalidArgumentError("group: MPI.COMM_NULL, expected a communicator this rank is in")
    if comm.Is_inter():
        raise InvalidArgumentError("group: an intercommunicator, expected an intracommunicator")
    if not _cpattn.has_mpi:
        raise UnsupportedError(
            "this cpattn was built without MPI: install an MPI with its headers (Debian: "
            "libopenmpi-dev) and build it again"
        )
    _require_same_mpi()
    global _keyval
    if _keyval is None:
        # Deleting the attribute drops the group; dup() of a communicator does not inherit it.
        _keyval = mpi.Comm.Create_keyval()
    group = comm.Get_attr(_keyval)
    if group is None:
        group = _cpattn.group_at(mpi._addressof(comm))
        comm.Set_attr(_keyval, group)
    return group


def _not_a_group(comm: Any) -> str:
    kind = f"{type(comm).__module__}.{type(comm).__qualname__}".replace("builtins.", "")
    if kind.startswith("torch.") and ("distributed" in kind or "ProcessGroup" in kind):
        return (
            f"group: a {kind}; torch.distributed groups have no MPI communicator to use: expected "
            "an mpi4py communicator of the same ranks (mpi4py.MPI.COMM_WORLD.Split(...)), "
            "cpattn.world() or cpattn.self_group()"
        )
    return (
        f"group: a {kind}, expected cpattn.world(), cpattn.self_group(), or an mpi4py communicator"
    )


def cuda_group(
    group: GroupLike = None,
    *,
    device: int,
    exchange: str = "auto",
    nccl_comm: Optional[int] = None,
    backend: Optional[str] = None,
    allocator: Any = None,
    timeout: float = 60.0,
) -> _Group:
    """The same ranks with their arrays in the memory of a GPU each. Collective.

    Not run on a GPU: tested on doubles of CUDA and NCCL that execute kernels on the CPU.

    Args:
        group: the ranks, as everywhere; None: the world.
        device: this rank's GPU, as CUDA counts those of this process.
        exchange: what moves rows between GPUs: "nccl"; "host", messages through host memory, which
            cannot be captured; "auto", nccl where every rank has a GPU of its own. Equal on all
            ranks.
        nccl_comm: address of an ncclComm_t of these ranks on these GPUs, which nobody else uses
            while plans of this group do, and which outlives them and graphs that were captured with
            them; None: one is made.
        backend: path of the shared object with the kernels; None: the installed one.
        allocator: where plans take device memory from: two functions, allocate(size, stream), which
            returns the address of `size` bytes for work of that stream (its handle), a multiple of
            256, or 0 when there are none; and free(address), when no work uses them any more. What
            they raise is told by sys.unraisablehook, and means that there are none. None:
            cudaMalloc.
        timeout: seconds for all of it.
    Returns:
        a group whose plans take arrays in that memory and a stream.
    Raises:
        UnsupportedError: on every rank, where a rank has no backend, no driver or one older than
            the runtime, no GPU, or one older than sm_80.
        InvalidArgumentError: on every rank, for an argument that is wrong or differs, no such
            device, two ranks on one GPU with nccl, an NCCL communicator that was destroyed or is of
            other ranks or another GPU.
        DeviceError, CommError: CUDA or NCCL failed, or a rank is late.
    """
    return _cpattn.cuda_group(
        group_of(group), device, exchange, nccl_comm, backend, allocator, timeout
    )


def max_over_ranks(
    values: Any, group: GroupLike = None, *, stream: Optional[int] = None, timeout: float = 60.0
) -> Any:
    """values[i] becomes the largest values[i] of any rank, in place. Collective.

    For `head_maxima` of a plan's forward. -inf is neutral ("nothing observed"), a NaN of any rank
    wins; the same bits on all ranks.

    Args:
        values: float32 [n], contiguous, writable, where the group's arrays are. On a GPU, what
            `stream` was given before is done when they are read, and the result is there for every
            stream when this returns; not in a capture.
        group: None: the world. stream: as in `Plan.forward`.
    Returns: values.
    Raises:
        InvalidArgumentError: on every rank, when any rank's array does not fit or lengths differ.
    """
    group_of(group).max_over_ranks(values, stream, timeout)
    return values


def group_of(group: GroupLike) -> _Group:
    """The group that an argument `group=` means; None: the world."""
    return world() if group is None else Group(group)


def complaint_of(error: Exception) -> str:
    """What a rank tells the others of its wrong arguments. Raised by it alone, whatever it is would
    leave them waiting: errors of Python's own (a wrong type, an unknown name) count as well."""
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def seconds(timeout: Any) -> float:
    """A timeout that can be waited for."""
    if isinstance(timeout, numpy.generic):
        timeout = timeout.item()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise InvalidArgumentError(f"timeout: {timeout!r}, expected a number of seconds")
    if not 0.001 <= timeout <= 86400:
        raise InvalidArgumentError(f"timeout: {timeout!r}, expected 0.001 to 86400 seconds")
    return float(timeout)
