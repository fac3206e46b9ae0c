"""The device code in an object file, a shared object or a .fatbin: cubins and PTX.

nvcc puts the code of a source file for all architectures in one container: a header (magic number,
version, its own size, size of what follows), then entries, each with a header that says what it is
and where its bytes end. The form is NVIDIA's to change; what does not fit it is an error here, and
so is a cubin that is compressed. PTX is compressed unless nvcc is told --no-compress.
"""

import dataclasses
import struct

import cubin

_MAGIC = struct.pack("<I", 0xBA55ED50)
_VERSION = 1
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of the header, size of the entries
# kind, version, size of the header, size of the payload; then, of no interest, three words and the
# version of the format; then the architecture, name of the source (two words), flags.
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE_AT = 28
_FLAGS_AT = 40
_KINDS = {1: "ptx", 2: "cubin"}
_ONE_ARCHITECTURE = 0x100000  # the "a" of sm_90a


@dataclasses.dataclass
class Entry:
    kind: str  # "cubin" or "ptx"
    architecture: str  # "80", "90a"
    payload: bytes


def _entry(data, at):
    """The entry at that place, and the place of the next."""
    kind, _version, header_size, size = _ENTRY.unpack_from(data, at)
    if kind not in _KINDS:
        raise ValueError(f"fatbin: an entry of kind {kind}, expected 1 (PTX) or 2 (cubin)")
    (architecture,) = struct.unpack_from("<I", data, at + _ARCHITECTURE_AT)
    (flags,) = struct.unpack_from("<Q", data, at + _FLAGS_AT)
    suffix = "a" if flags & _ONE_ARCHITECTURE else ""
    payload = data[at + header_size : at + header_size + size]
    if _KINDS[kind] == "cubin" and not payload.startswith(b"\x7fELF"):
        raise ValueError(f"fatbin: the cubin of sm_{architecture}{suffix} is compressed")
    return Entry(_KINDS[kind], f"{architecture}{suffix}", payload), at + header_size + size


def _containers(data):
    """Where a host's ELF file keeps them; all of it when it is none."""
    if not data.startswith(b"\x7fELF"):
        return data
    sections = [s for s in cubin.sections_of(data) if s.name == ".nv_fatbin"]
    return b"".join(data[s.offset : s.offset + s.size] for s in sections)


def read(data):
    """The entries of every container in `data`, in order."""
    data = _containers(data)
    entries = []
    at = data.find(_MAGIC)
    while at >= 0:
        _magic, version, header_size, size = _CONTAINER.unpack_from(data, at)
        if version != _VERSION:
            raise ValueError(f"fatbin: version {version}, expected {_VERSION}")
        end = at + header_size + size
        at += header_size
        while at < end:
            entry, at = _entry(data, at)
            entries.append(entry)
        at = data.find(_MAGIC, at)
    return entries
