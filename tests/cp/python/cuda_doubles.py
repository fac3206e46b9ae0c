"""GPUs for tests: the doubles of CUDA and NCCL, whose shared object the library opens as its
backend and whose functions are called here by the names that the runtime's header gives them.
Kernels are executed on the CPU, and "device memory" is memory of the host, so tests look at it
where it is."""

import ctypes
import math
import os
import time

import numpy

PATH = os.environ["CPATTN_CUDA_DOUBLES"]
_LIBRARY = ctypes.CDLL(PATH)

DLPACK_CUDA = 2
_TYPES = {"float32": (2, 32, "<f4"), "float16": (2, 16, "<f2"), "bfloat16": (4, 16, None)}


def call(name, *arguments):
    """A function of the runtime, which must succeed."""
    status = getattr(_LIBRARY, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: status {status}")


def machine(**fields):
    """The machine from now on; reset() takes it back."""
    for field, value in fields.items():
        if _LIBRARY.cpattn_fake_machine(field.encode(), ctypes.c_long(value)) != 0:
            raise ValueError(field)


def reset():
    _LIBRARY.cpattn_fake_reset()


def _made(name, *arguments):
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle), *arguments)
    return handle.value


class Stream:
    """A CUDA stream of a device."""

    def __init__(self, device=0, handle=None):
        call("cudaSetDevice", device)
        self.handle = _made("cudaStreamCreate") if handle is None else handle

    def synchronize(self):
        call("cudaStreamSynchronize", ctypes.c_void_p(self.handle))

    def destroy(self):
        call("cudaStreamDestroy", ctypes.c_void_p(self.handle))


# Where the machine has one (has_default_stream).
DEFAULT_STREAM = Stream(0, 0)


def copy_in(stream, to, source):
    """Copies an array to another one of the same device, in the order of the stream."""
    size = ctypes.c_size_t(source.here.nbytes)
    handle = ctypes.c_void_p(stream.handle)
    addresses = ctypes.c_void_p(to.address), ctypes.c_void_p(source.address)
    call("cudaMemcpyAsync", *addresses, size, 3, handle)  # 3: within the device


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _dawdle(_):
    time.sleep(0.2)


def dawdle(stream):
    """The stream takes longer for this than the host takes for a call."""
    call("cudaLaunchHostFunc", ctypes.c_void_p(stream.handle), _dawdle, None)


class Graph:
    """What `work` gives to a stream, recorded."""

    def __init__(self, stream, work):
        handle = ctypes.c_void_p(stream.handle)
        call("cudaStreamBeginCapture", handle, 0)
        try:
            work()
        finally:
            graph = ctypes.c_void_p()
            call("cudaStreamEndCapture", handle, ctypes.byref(graph))
        self._exec = _made("cudaGraphInstantiate", graph, ctypes.c_ulonglong(0))
        call("cudaGraphDestroy", graph)

    def replay(self, stream):
        call("cudaGraphLaunch", ctypes.c_void_p(self._exec), ctypes.c_void_p(stream.handle))

    def destroy(self):
        call("cudaGraphExecDestroy", ctypes.c_void_p(self._exec))


def allocate(size, device=0):
    """The address of so many bytes of device memory, for as long as the process lives."""
    call("cudaSetDevice", device)
    return _made("cudaMalloc", ctypes.c_size_t(max(size, 16)))


def host_view(address, shape, dtype):
    """Device memory as numpy sees it; bfloat16 as bit patterns."""
    name = "uint16" if dtype == "bfloat16" else dtype
    count = math.prod(shape)
    memory = (ctypes.c_char * (count * numpy.dtype(name).itemsize)).from_address(address)
    return numpy.frombuffer(memory, name, count).reshape(shape)


def bf16_bits(array):
    """The bfloat16 below each number, as its bit pattern."""
    return (numpy.ascontiguousarray(array, numpy.float32).view(numpy.uint32) >> 16).astype("uint16")


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),  # of the managed tensor
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def capsule(keeper, address, shape, strides, dtype, device):
    """A DLPack capsule of device memory. What it points at lives as long as `keeper`, a list."""
    code, bits, _ = _TYPES[dtype]
    numbers = ctypes.c_int64 * len(shape)
    tensor = _DlTensor(
        address, DLPACK_CUDA, device, len(shape), code, bits, 1, numbers(*shape), numbers(*strides)
    )
    keeper.append(tensor)
    return _new_capsule(ctypes.addressof(tensor), b"dltensor", None)


class DeviceArray:
    """An array in device memory, [shape] without gaps; `here` is what it holds."""

    def __init__(self, shape, dtype="float32", device=0, fill=None):
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        size = math.prod(self.shape) * _TYPES[dtype][1] // 8
        self.address = allocate(size, device)
        self.here = host_view(self.address, self.shape, dtype)
        self.asked_for = []  # streams that consumers named
        if fill is not None:
            self.put(fill)

    def put(self, values):
        self.here[...] = bf16_bits(values) if self.dtype == "bfloat16" else values

    @property
    def strides(self):
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


class DlpackArray(DeviceArray):
    """One that speaks DLPack, as torch's tensors do."""

    def __dlpack_device__(self):
        return DLPACK_CUDA, self.device

    def __dlpack__(self, stream=None):
        self.asked_for.append(stream)
        self._kept = getattr(self, "_kept", [])
        return capsule(
            self._kept, self.address, self.shape, self.strides, self.dtype, self.device
        )


class InterfaceArray(DeviceArray):
    """One that speaks the CUDA array interface, as Numba's do. `stream`: where it was written."""

    stream = None

    @property
    def __cuda_array_interface__(self):
        entries = {
            "shape": self.shape,
            "typestr": _TYPES[self.dtype][2] or "<V2",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }
        if self.stream is not None:
            entries["stream"] = self.stream
        return entries
