"""Memory that the host's processors cannot touch, such as a GPU's, as the engine sees it.

Paths that move host memory *stage* it: bytes go through host memory on their way in and out. A network card can
do better where the driver lets it reach such memory itself, in one of two ways:

* **dma-buf**: the device's driver exports the memory as a descriptor, from which the card's driver maps it;
* **peer memory**: a kernel module (``nvidia_peermem``) lets the card's driver map a device's address like a host's.

:func:`plan_access` says which ways are worth trying and why not the others; the card's driver has the last word.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Way(StrEnum):
    """How a network card gets at a device's memory."""

    DMA_BUF = "dma-buf"
    PEER = "peer memory"
    STAGED = "staged through host memory"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Why a way cannot be gone, as far as the device and its driver know; empty where it may."""

    no_dma_buf: str = ""
    no_peer: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """``ways`` to try, best first; the last one, staging, always works. ``why_not``: {way: what speaks against it}."""

    ways: tuple[Way, ...]
    why_not: dict[Way, str]

    def reason(self, way: Way) -> str:
        """Why it came to ``way``: what speaks against the better ones."""
        better = list(Way)[:list(Way).index(way)]
        return "; ".join(f"no {other}: {self.why_not[other]}" for other in better if other in self.why_not)


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """``fd``, the taker's, holds memory whose byte ``offset`` is the first one that is meant."""

    fd: int
    offset: int


class DeviceMemory(ABC):
    """``nbytes`` bytes of a device, alive as long as this is. Thread-safe."""

    nbytes: int

    @abstractmethod
    def to_host(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Copies ``[offset, offset + len(out))`` into ``out``, as of when the device has done what it was given to do;
        returns when it is there."""

    @abstractmethod
    def from_host(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Copies ``data`` to ``[offset, offset + len(data))``; returns when it is there."""

    def settle(self) -> None:  # noqa: B027  a device without queues has nothing to wait for
        """Returns when everything is done that the device was given to do with it, so that others may read."""

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New host memory that copies to and from here are quick with."""
        return np.empty(nbytes, dtype=np.uint8)

    def card_facts(self) -> CardFacts:
        """What lets network cards reach it. Raises nothing."""
        return CardFacts("the device exports none", "the device has none")

    def dma_buf(self) -> DmaBuf:
        """For :attr:`Way.DMA_BUF`; close the descriptor after use. Raises ``OSError``."""
        raise OSError(errno.ENOTSUP, "the device exports none")

    def peer_address(self) -> int:
        """What the device calls the first byte, for :attr:`Way.PEER`. Raises ``OSError``."""
        raise OSError(errno.ENOTSUP, "the device has none")


def plan_access(facts: CardFacts, *, no_dma_buf: str = "") -> Access:
    """Pure. ``no_dma_buf``: why the cards' side takes none, if it does not."""
    why_not = {Way.DMA_BUF: facts.no_dma_buf or no_dma_buf, Way.PEER: facts.no_peer}
    why_not = {way: why for way, why in why_not.items() if why}
    return Access(tuple(way for way in Way if way not in why_not), why_not)
