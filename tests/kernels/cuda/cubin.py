"""What a cubin says about its kernels: registers, stack, and how often each kind of instruction.

A cubin is a 64-bit ELF file. Kernel K lies in section .text.K as instructions of 16 bytes whose
low 12 bits name the operation; registers and stack are attributes in section .nv.info, one entry
per symbol. The names of operations are NVIDIA's to change: compile_check.py counts the ones it
relies on in the PTX as well, and a count that disagrees fails.
"""

import collections
import dataclasses
import struct

# Low 12 bits of an instruction, sm_80 to sm_120.
OPERATIONS = {
    0x23C: "hmma",
    0x9F0: "hgmma",  # both operands in shared memory
    0xDF0: "hgmma",  # the first in registers
    0x5B4: "utmaldg",
    0x3BA: "ublkcp",
    0x83B: "ldsm",
    0xFAE: "ldgsts",
    0x387: "stl",
    0x983: "ldl",
}
LOCAL_MEMORY = ("stl", "ldl")

_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_SYMBOL_TABLE = 2
_VALUE_WITH_SIZE = 4  # the form of attribute that carries a block of bytes


@dataclasses.dataclass
class Kernel:
    name: str
    registers: int
    stack_bytes: int
    num_instructions: int
    operations: collections.Counter  # by name, of those in OPERATIONS

    def local_accesses(self):
        return sum(self.operations[name] for name in LOCAL_MEMORY)


@dataclasses.dataclass
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def _string(data, offset):
    return data[offset : data.index(b"\0", offset)].decode()


def sections_of(data):
    """The sections of a 64-bit ELF file."""
    table, = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = []
    for i in range(count):
        fields = struct.unpack_from("<IIQQQQI", data, table + i * entry_size)
        name, kind, _flags, _address, offset, size, link = fields
        headers.append((name, kind, offset, size, link))
    names = headers[names_index][2]
    return [_Section(_string(data, names + h[0]), *h[1:]) for h in headers]


def _symbols(data, sections):
    table = next(s for s in sections if s.kind == _SYMBOL_TABLE)
    names = sections[table.link].offset
    entries = range(table.offset, table.offset + table.size, 24)
    return [_string(data, names + struct.unpack_from("<I", data, at)[0]) for at in entries]


def _attributes(data, sections, symbols):
    """{attribute: {symbol: value}} for those that have one number per symbol."""
    found = {_REGISTER_COUNT: {}, _FRAME_SIZE: {}}
    for section in sections:
        if section.name != ".nv.info":
            continue
        at = section.offset
        while at < section.offset + section.size:
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            if form == _VALUE_WITH_SIZE and attribute in found:
                symbol, value = struct.unpack_from("<II", data, at + 4)
                found[attribute][symbols[symbol]] = value
            at += 4 + (size if form == _VALUE_WITH_SIZE else 0)
    return found


def read(data):
    """The kernels of a cubin, given as bytes."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: no 64-bit ELF header")
    sections = sections_of(data)
    attributes = _attributes(data, sections, _symbols(data, sections))
    kernels = []
    for section in sections:
        if not section.name.startswith(".text."):
            continue
        name = section.name[len(".text.") :]
        operations = collections.Counter()
        for at in range(section.offset, section.offset + section.size, 16):
            code = struct.unpack_from("<H", data, at)[0] & 0xFFF
            if code in OPERATIONS:
                operations[OPERATIONS[code]] += 1
        kernels.append(
            Kernel(
                name,
                attributes[_REGISTER_COUNT].get(name, 0),
                attributes[_FRAME_SIZE].get(name, 0),
                section.size // 16,
                operations,
            )
        )
    return kernels
