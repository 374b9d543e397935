from typing import Any

import numpy.typing as npt
from typing_extensions import Buffer

Memory = Buffer | npt.NDArray[Any]

API: int

class Stream:
    def __init__(self, fd: int, spin_us: float) -> None: ...
    def receive(self, into: Memory, flags: int, descriptors: list[int] | None = None, /) -> int: ...
    def exchange(self, head: Memory, payload: Memory, into: Memory, deadline_s: float, /) -> int: ...

def copy(to: Memory, source: Memory, length: int, count: int, stride: int, /) -> None: ...
