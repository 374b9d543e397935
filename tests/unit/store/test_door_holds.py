"""What clients borrow and pin, against the pool's own books."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.ids import BlockKey, OperationId
from shared.kv import pack_keys
from shared.messages import StoredBlock
from shared.store import door_frames as frames
from shared.store.blocks import BlockPool
from shared.store.door_holds import LEAST_LENT, Holds
from shared.store.door_visit import Visit
from tests.support.blocks import make_chain

BLOCKS = 64
CLIENTS = ("c1", "c2", "c3")


class Agent:
    """The part of a store agent that holds ask for."""

    ssd = None

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS)

    def pin(self, operation: OperationId, keys: Sequence[BlockKey]) -> list[int]:
        return self.pool.pin(operation, keys, now=0.0)

    def release(self, operation: OperationId) -> None:
        self.pool.release(operation)

    def holds(self, key: BlockKey) -> bool:
        return self.pool.block(key) is not None

    def trim(self, keys: Sequence[BlockKey], reason: str) -> int:
        return len(self.pool.drop(keys))


class Keep:
    """Of a door."""

    num_blocks = BLOCKS

    def __init__(self, *, all_tenants: bool = False) -> None:
        self.agent, self.all_tenants, self._count = Agent(), all_tenants, 0

    def new_operation(self, visit: Visit) -> OperationId:
        self._count += 1
        return OperationId(f"{visit.id}.{self._count}")

    def seen(self, key: BlockKey, tenant: str) -> StoredBlock | None:
        block = self.agent.pool.block(key)
        return block if block is None or self.all_tenants or block.tenant == tenant else None

    def store(self, blocks: Sequence[StoredBlock]) -> None:
        """Puts them into the pool."""
        operation = OperationId("store")
        allocation = self.agent.pool.allocate(operation, len(blocks), now=0.0)
        assert allocation is not None
        for slot, block in zip(allocation.slots, blocks, strict=True):
            self.agent.pool.seal(operation, slot, block, now=0.0)
        self.agent.pool.release(operation)


def visit(client: str, number: int = 0, tenant: str = "") -> Visit:
    """A local one that has entered."""
    enter = frames.Enter(frames.VERSION, client, "1", "", tenant, 0.0, b"", 0, "", 0.0)
    line: Any = None
    return Visit(line, True, f"{client}-{number}", client, 0.0, None, OperationId("stock"), enter)


def get(*blocks: StoredBlock) -> frames.Get:
    return frames.Get(pack_keys([block.key for block in blocks]), 1000)


class Borrowing(RuleBasedStateMachine):
    """Several connections of several clients borrow, and are done or late in any order."""

    def __init__(self) -> None:
        super().__init__()
        keep: Any = Keep()
        self.pool, self.holds = keep.agent.pool, Holds(keep)
        self.singles = [make_chain(f"single {i}", 1)[0] for i in range(32)]
        self.chain = make_chain("chain", 24)
        keep.store(self.singles)
        keep.store(self.chain)
        self.visits = [visit(client, number) for client in CLIENTS for number in range(2)]

    def lent(self) -> Counter[str]:
        """{client: blocks that its loans keep}, by the pool's books."""
        of: Counter[str] = Counter()
        for one in self.visits:
            assert one.enter is not None
            of[one.enter.client] += sum(self.pool.pinned_by(loan.operation) for loan in one.loans)
        return of

    @rule(which=st.integers(0, 5), first=st.integers(0, 31), count=st.integers(1, 12))
    def borrow(self, which: int, first: int, count: int) -> None:
        one, wanted = self.visits[which], self.singles[first:first + count]
        self.check(one, len(wanted), self.holds.lend(one, get(*wanted)))

    @rule(which=st.integers(0, 5), depth=st.integers(0, 23))
    def borrow_with_what_it_continues(self, which: int, depth: int) -> None:
        one = self.visits[which]
        self.check(one, depth + 1, self.holds.lend(one, get(self.chain[depth])))

    def check(self, one: Visit, count: int, found: frames.Found | None) -> None:
        assert one.enter is not None
        of = self.lent()
        if found is not None:
            of[one.enter.client] -= count
        theirs, everybody = of[one.enter.client], of.total()
        fits = (not theirs or theirs + count <= LEAST_LENT) and (not everybody or everybody + count <= 2 * LEAST_LENT)
        assert (found is not None) == fits

    @rule(which=st.integers(0, 5), count=st.integers(1, 3))
    def say_done(self, which: int, count: int) -> None:
        self.holds.end_loans(self.visits[which], count)

    @rule(which=st.integers(0, 5))
    def be_late(self, which: int) -> None:
        loans = self.visits[which].loans
        self.holds.end_overdue(self.visits[which], float("inf"))
        assert all(loan.is_over for loan in loans)
        self.visits[which].loans = deque()

    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        self.holds.end_all(self.visits[which])
        old = self.visits[which]
        assert old.enter is not None
        self.visits[which] = visit(old.enter.client, which % 2)

    @precondition(lambda self: not any(one.loans for one in self.visits))
    @rule(depth=st.integers(0, 23))
    def whoever_is_alone_gets_what_it_wants(self, depth: int) -> None:
        assert self.holds.lend(self.visits[0], get(self.chain[depth])) is not None

    @invariant()
    def only_loans_keep_anything(self) -> None:
        self.pool.check_invariants()
        if not any(one.loans for one in self.visits):
            assert self.pool.statistics().pinned == 0


TestBorrowing = Borrowing.TestCase
TestBorrowing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("all_tenants", [False, True])
def test_what_another_tenant_has_is_not_here_unless_the_operator_says_so(all_tenants: bool) -> None:
    keep: Any = Keep(all_tenants=all_tenants)
    holds = Holds(keep)
    theirs, ours = make_chain("theirs", 1, tenant="a"), make_chain("ours", 1, tenant="b")
    keep.store([*theirs, *ours])
    both = pack_keys([theirs[0].key, ours[0].key])
    one = visit("c1", tenant="b")
    found = holds.lend(one, frames.Get(both, 1000))
    assert found is not None
    assert [slot != frames.MISSING for slot in found.slots] == [all_tenants, True]
    holds.end_loans(one, 1)
    assert holds.look(one, frames.Look(both)) == frames.Marks([int(all_tenants), 1])
    assert holds.pin(one, frames.Pin("p", both, 1000)) == frames.Marks([int(all_tenants), 1])
    assert keep.agent.pool.statistics().pinned == 1 + all_tenants
    holds.unpin(one, frames.Unpin("p"))
    assert holds.drop(one, frames.Drop(both)) == frames.Marks([int(all_tenants), 1])
    assert keep.agent.holds(theirs[0].key) == (not all_tenants)
