"""Memory of devices that are none: what a network card would make of it shows whether it was touched."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from shared.transfer.device import CardFacts, DeviceMemory, DmaBuf

VEIL = np.uint8(0xA5)


class VeiledMemory(DeviceMemory):
    """Every byte is another one than its device says: whoever reads or writes it directly gets it wrong.

    Copies wait while ``gate`` is shut.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.cells = np.full(nbytes, VEIL, dtype=np.uint8)
        self.gate = threading.Event()
        self.gate.set()
        self.copies = 0

    def to_host(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        self._copying()
        np.bitwise_xor(self.cells[offset:offset + len(out)], VEIL, out=out)

    def from_host(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self._copying()
        np.bitwise_xor(data, VEIL, out=self.cells[offset:offset + len(data)])

    def put(self, data: bytes) -> None:
        """As a program of the device's would."""
        np.bitwise_xor(np.frombuffer(data, dtype=np.uint8), VEIL, out=self.cells)

    def content(self) -> bytes:
        """What the device says of it."""
        return (self.cells ^ VEIL).tobytes()

    def _copying(self) -> None:
        self.gate.wait()
        self.copies += 1


class OpenMemory(VeiledMemory):
    """The cards reach it by its address, for it is none but the host's; there is no veil before it.

    With ``exports`` its device says that it exports a dma-buf, of which no card's driver will have anything.
    """

    def __init__(self, nbytes: int, *, exports: bool = False) -> None:
        super().__init__(nbytes)
        self.cells[:] = 0
        self.exports = exports

    def to_host(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        self._copying()
        out[:] = self.cells[offset:offset + len(out)]

    def from_host(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        self._copying()
        self.cells[offset:offset + len(data)] = data

    def put(self, data: bytes) -> None:
        self.cells[:] = np.frombuffer(data, dtype=np.uint8)

    def content(self) -> bytes:
        return self.cells.tobytes()

    def card_facts(self) -> CardFacts:
        return CardFacts(no_dma_buf="" if self.exports else "this device exports none")

    def dma_buf(self) -> DmaBuf:
        fd = os.memfd_create("no-dma-buf")
        os.ftruncate(fd, self.nbytes)
        return DmaBuf(fd, 0)

    def peer_address(self) -> int:
        return int(self.cells.ctypes.data)
