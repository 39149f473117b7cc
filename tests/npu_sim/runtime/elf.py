"""The dynamic symbols of a 64-bit little-endian ELF file, for machines without binutils."""

from __future__ import annotations

import struct
from pathlib import Path

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC_SYMBOLS = 11
_GLOBAL = 1


def undefined_symbols(file: Path) -> set[str]:
    """The names that the file needs from elsewhere, without those that may be missing (weak).

    Raises:
        ValueError: it is no such ELF file.
    """
    content = file.read_bytes()
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{file.name} is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(content, table + index * size) for index in range(count)]
    names: set[str] = set()
    for _, kind, _, _, offset, length, link, _, _, _ in headers:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        strings = headers[link][4]
        for at in range(offset, offset + length, _SYMBOL.size):
            name, info, _, section, _, _ = _SYMBOL.unpack_from(content, at)
            if section == 0 and info >> 4 == _GLOBAL:
                start = strings + name
                names.add(content[start : content.index(b"\0", start)].decode())
    return names
