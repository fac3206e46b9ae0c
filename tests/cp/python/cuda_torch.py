"""Tensors of torch that say they are on a GPU, for a torch without CUDA: their memory is that of
the doubles, torch computes on it where it is, and what torch would allocate on a GPU is allocated
there. So cpattn.torch runs as it does for CUDA tensors, but for `cuda_stream`, which is replaced.
"""

import contextlib
import math
from unittest import mock

import cuda_doubles
import torch
from torch.overrides import TorchFunctionMode

from cpattn import _torch_call

_ARENA_BYTES = 1 << 24
_arenas = {}  # by device: where it begins, and how much of it is taken


def _take(size, index):
    """Memory that was allocated before: in a capture nothing can be, and torch has a pool, too."""
    if index not in _arenas:
        _arenas[index] = [cuda_doubles.allocate(_ARENA_BYTES, index), 0]
    begin, used = _arenas[index]
    _arenas[index][1] = used + (size + 255) // 256 * 256
    assert _arenas[index][1] <= _ARENA_BYTES, "a test that takes more than the arena has"
    return begin + used


def _is_there(tensor):
    return any(0 <= tensor.data_ptr() - begin < _ARENA_BYTES for begin, _ in _arenas.values())


class Tensor(torch.Tensor):
    """A tensor whose memory is a device's."""

    index = 0
    __torch_function__ = torch._C._disabled_torch_function_impl  # _Mode sees to what comes out

    @property
    def device(self):
        return torch.device("cuda", Tensor.index)

    def __dlpack_device__(self):
        return cuda_doubles.DLPACK_CUDA, Tensor.index

    def __dlpack__(self, stream=None):
        if self.requires_grad:
            raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")
        kept = self.__dict__.setdefault("_kept", [])
        name = str(self.dtype).split(".")[1]
        return cuda_doubles.capsule(
            kept, self.data_ptr(), self.shape, self.stride(), name, Tensor.index
        )


def empty(shape, dtype=torch.float32):
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    address = _take(size, Tensor.index)
    memory = torch.from_numpy(cuda_doubles.host_view(address, (size,), "uint8"))
    return memory.view(dtype).view(*shape).as_subclass(Tensor)


def put(tensor):
    """A copy on the device."""
    there = empty(tensor.shape, tensor.dtype)
    torch.Tensor.copy_(there, tensor)
    return there


class _Mode(TorchFunctionMode):
    """What a CUDA build of torch does: new tensors are where their like is."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        name = getattr(function, "__name__", "")
        device = keywords.get("device")
        if device is not None and torch.device(device).type == "cuda":
            del keywords["device"]
            return put(function(*arguments, **keywords))
        result = function(*arguments, **keywords)
        if name in ("contiguous", "clone", "zeros_like") and not _is_there(result):
            return put(result)
        return self._marked(result)

    def _marked(self, result):
        # Autograd hands back plain tensors of the memory it was given.
        if type(result) is torch.Tensor and result.layout == torch.strided and _is_there(result):
            return result.as_subclass(Tensor)
        return result


@contextlib.contextmanager
def on_gpu(index, stream, is_capturing=lambda: False):
    """A torch whose GPU is `index` and whose current stream has this handle."""
    Tensor.index = index

    def fake(device):
        return (None, False) if device.type == "cpu" else (stream, is_capturing())

    with mock.patch.object(_torch_call, "cuda_stream", fake), _Mode():
        yield
