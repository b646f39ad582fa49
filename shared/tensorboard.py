"""Writes TensorBoard curves synchronously: a full disk loses points and never stops the service.

TensorBoard's writers import torch and block without end once their thread meets a full disk. The format is small:
TFRecords of protobuf `Event`s.
"""

import errno
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from tuneloop.shared.held_files import make_below

log = structlog.get_logger()


def _crc32c_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC32C = tuple(_crc32c_of(byte) for byte in range(256))


class Curves:
    """A TensorBoard run: a file in `folder`, made again if deleted; earlier runs' points `after` a step are purged."""

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        # Without the nanoseconds, two runs begun in the same second would write into the same file.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.time_ns()}"
        self._path = folder / name
        self._head = _record(_text(3, b"brain.Event:2"))
        if after is not None:
            self._head += _record(_number(2, after + 1) + _text(7, _number(1, 1)))  # SessionLog.START
        self._size = 0  # of what is whole in the file
        self._failing = self._closed = False
        self._append(b"")

    def add(self, step: int, values: Mapping[str, float]) -> bool:
        """Write the values as points at `step`; whether they were. Never raises: the first failure is logged."""
        return self._append(b"".join(_point(step, name, value) for name, value in values.items()))

    def close(self) -> None:
        self._closed = True

    def _append(self, records: bytes) -> bool:
        if self._closed:
            return False
        try:
            if self._size and not self._path.exists():
                self._size = 0
            make_below(self._path.parent)
            with self._path.open("r+b" if self._size else "wb", buffering=0) as file:
                file.truncate(self._size)  # Half a record of a write that failed; no reader gets past one.
                file.seek(self._size)
                data = records if self._size else self._head + records
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._size += len(data)
        except OSError as error:
            if not self._failing:
                log.warning("curves_not_written", folder=str(self._path.parent), reason=str(error))
            self._failing = True
            return False
        self._failing = False
        return True


def _point(step: int, name: str, value: float) -> bytes:
    try:
        number = struct.pack("<f", value)
    except OverflowError:
        number = struct.pack("<f", math.copysign(math.inf, value))
    point = _text(1, name.encode()) + b"\x15" + number  # Summary.Value: tag, simple_value
    return _record(_number(2, step) + _text(5, _text(1, point)))


def _record(event: bytes) -> bytes:
    event = b"\x09" + struct.pack("<d", time.time()) + event
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# The two kinds of protobuf fields that are needed.


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
