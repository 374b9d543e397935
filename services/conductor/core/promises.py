"""Blocks that decisions made, and nobody announced yet: siblings of one burst arrive before the first is computed.

A promise ends when its request is prefilled and some seconds have passed (the announcement is under way), when the
request ends otherwise, or when it has become too old to be believed.

A promise counts for the worker itself only: a prompt placed there is computed after the one that brings the blocks.
Others can pull only what is held.

Keys are chained, so prompts that share a key share all before it: the promised prompts are a tree, with a node for
each stretch of blocks that the same promises have. A promise is made, found and ended in as many steps as there are
nodes on its way.
"""

from __future__ import annotations

import heapq
from collections import Counter

from shared.errors import Bug
from shared.ids import RequestId, WorkerId
from shared.kv import KEY_BYTES


class _Node:
    """A stretch of blocks."""

    __slots__ = ("children", "keys", "parent", "workers")

    def __init__(self, keys: bytes, parent: _Node | None) -> None:
        self.keys = keys
        """Packed."""
        self.parent = parent
        #: {first key of the child: child}
        self.children: dict[bytes, _Node] = {}
        #: {worker: promises that have all of this}; never 0
        self.workers: Counter[WorkerId] = Counter()


class Promises:
    """{request: (worker, prompt)}; bounded by ``max_blocks`` distinct blocks."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._root = _Node(b"", None)
        self._blocks = 0
        #: {request: (worker, the last node of its way, when it ends)}
        self._made: dict[RequestId, tuple[WorkerId, _Node, float]] = {}
        #: (when, request): entries whose time is not the promise's any more are skipped
        self._ends: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        """Distinct blocks that are promised."""
        return self._blocks

    def make(self, request: RequestId, worker: WorkerId, keys: bytes, *, until_s: float) -> None:
        """``worker`` will hold these packed ``keys`` once ``request`` is computed there.

        Replaces the request's former promise. Not taken when there would be too many.
        """
        self.end(request)
        if not keys or self._blocks + len(keys) // KEY_BYTES > self._max_blocks:
            return
        node, rest = self._root, keys
        while rest:
            child = node.children.get(rest[:KEY_BYTES])
            if child is None:
                child = node.children[rest[:KEY_BYTES]] = _Node(rest, node)
                self._blocks += len(rest) // KEY_BYTES
            shared = _shared_bytes(child.keys, rest)
            if shared < len(child.keys):
                child = self._split(child, shared)
            child.workers[worker] += 1
            node, rest = child, rest[shared:]
        self._made[request] = (worker, node, until_s)
        heapq.heappush(self._ends, (until_s, request))

    def lengths(self, keys: bytes) -> dict[WorkerId, int]:
        """{worker: leading blocks of these packed ``keys`` that it is promised}."""
        lengths: dict[WorkerId, int] = {}
        node, rest, blocks = self._root, keys, 0
        while rest and (child := node.children.get(rest[:KEY_BYTES])) is not None:
            shared = _shared_bytes(child.keys, rest)
            blocks += shared // KEY_BYTES
            lengths.update(dict.fromkeys(child.workers, blocks))
            if shared < len(child.keys):
                break
            node, rest = child, rest[shared:]
        return lengths

    def end_at(self, request: RequestId, until_s: float) -> None:
        """The promise of ``request`` ends then, be that sooner or later than thought."""
        if (made := self._made.get(request)) is not None:
            self._made[request] = (made[0], made[1], until_s)
            heapq.heappush(self._ends, (until_s, request))

    def end(self, request: RequestId) -> None:
        """The promise of ``request`` is over."""
        made = self._made.pop(request, None)
        if made is None:
            return
        worker, node, _ = made
        while (parent := node.parent) is not None:
            node.workers[worker] -= 1
            if not node.workers[worker]:
                del node.workers[worker]
                if not node.workers:
                    del parent.children[node.keys[:KEY_BYTES]]
                    self._blocks -= len(node.keys) // KEY_BYTES
            node = parent

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone: so are its promises."""
        for request in [request for request, (who, _, _) in self._made.items() if who == worker]:
            self.end(request)

    def tick(self, now: float) -> None:
        """Ends what is due."""
        while self._ends and self._ends[0][0] <= now:
            until_s, request = heapq.heappop(self._ends)
            made = self._made.get(request)
            if made is not None and made[2] == until_s:
                self.end(request)

    def next_wake(self) -> float | None:
        """When :meth:`tick` has something to end."""
        ends, made = self._ends, self._made
        while ends and ((found := made.get(ends[0][1])) is None or found[2] != ends[0][0]):
            heapq.heappop(ends)  # whoever changed its time would be woken for nothing
        return ends[0][0] if ends else None

    def check_invariants(self) -> None:
        """Raises :class:`Bug` when the tree is not that of the promises."""
        expected: Counter[tuple[int, WorkerId]] = Counter()
        for worker, node, _ in self._made.values():
            at: _Node | None = node
            while at is not None and at.parent is not None:
                expected[id(at), worker] += 1
                at = at.parent
        found: dict[tuple[int, WorkerId], int] = {}
        blocks, stack = 0, [*self._root.children.values()]
        while stack:
            at = stack.pop()
            blocks += len(at.keys) // KEY_BYTES
            found.update({(id(at), worker): count for worker, count in at.workers.items()})
            stack += at.children.values()
        if found != dict(expected) or blocks != self._blocks:
            raise Bug(f"promises: the tree has {blocks} blocks and {len(found)} marks, "
                      f"{self._blocks} and {len(expected)} were promised")

    @staticmethod
    def _split(node: _Node, at: int) -> _Node:
        """Cuts ``node`` at so many bytes; its head, which is new. Who ended at ``node`` still does."""
        parent = node.parent
        assert parent is not None
        head = _Node(node.keys[:at], parent)
        head.workers.update(node.workers)
        parent.children[head.keys[:KEY_BYTES]] = head
        node.keys, node.parent = node.keys[at:], head
        head.children[node.keys[:KEY_BYTES]] = node
        return head


def _shared_bytes(one: bytes, other: bytes) -> int:
    """Length of the whole keys that both begin with."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    if one[:high * KEY_BYTES] == other[:high * KEY_BYTES]:
        return high * KEY_BYTES
    while high - low > 1:  # the first ``low`` are shared, the first ``high`` are not
        middle = (low + high) // 2
        start, end = low * KEY_BYTES, middle * KEY_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle
    return low * KEY_BYTES
