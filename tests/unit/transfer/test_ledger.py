"""The receiver's books, without any connection."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from shared.clock import ManualClock
from shared.errors import Bug
from shared.ids import Incarnation, OperationId, WorkerId
from shared.messages import Grant, Range
from shared.transfer.frames import Claim, Span
from shared.transfer.ledger import Ledger, Refused, Writer, checksum
from shared.transfer.segment import Segment

OP = OperationId("op")


class Books:
    """A ledger over one segment of 1000 bytes, and the sender's part played by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.condemned: list[str] = []
        self.segment = Segment.allocate("kv", 1000)
        self.ledger = Ledger(WorkerId("w"), Incarnation("i"), {"kv": self.segment}, clock=self.clock)

    def grant(self, *ranges: tuple[int, int], operation: OperationId = OP, ttl_s: float = 10.0) -> Grant:
        return self.ledger.grant(operation, [of(start, stop) for start, stop in ranges], ttl_s=ttl_s)

    def begin(self, grant: Grant, *spans: tuple[int, int]) -> Writer:
        claim = Claim(0, grant.operation, grant.incarnation, grant.token, 1000,
                      [Span("kv", start, stop - start) for start, stop in spans], None, [])
        return self.ledger.begin(claim, path="test", sender="s", condemn=self.condemned.append)

    def sums(self, writer: Writer) -> list[int]:
        return [checksum(self.segment.array[s.offset:s.offset + s.length]) for s in writer.spans]

    def write(self, grant: Grant, *spans: tuple[int, int]) -> None:
        writer = self.begin(grant, *spans)
        assert self.ledger.verify(writer, self.sums(writer)) == []

    def covered(self, start: int, stop: int) -> bool:
        return self.ledger.covered(OP, of(start, stop))


def of(start: int, stop: int) -> Range:
    return Range(segment="kv", offset=start, length=stop - start)


@pytest.fixture
def books() -> Iterator[Books]:
    books = Books()
    yield books
    books.segment.close()


def test_a_range_is_covered_once_every_byte_is_verified(books: Books) -> None:
    grant = books.grant((100, 200))
    books.write(grant, (100, 130))
    books.write(grant, (150, 200))
    assert books.covered(100, 130) and books.covered(160, 170)
    assert not books.covered(100, 200) and not books.covered(129, 131)
    books.write(grant, (130, 150))
    assert books.covered(100, 200)
    assert not books.covered(99, 200)
    assert books.ledger.received_bytes(OP) == 100


def test_writing_twice_counts_once(books: Books) -> None:
    grant = books.grant((0, 10))
    books.write(grant, (0, 10))
    books.write(grant, (0, 10))
    assert books.ledger.received_bytes(OP) == 10


def test_nothing_is_covered_while_somebody_writes_there(books: Books) -> None:
    grant = books.grant((0, 100))
    books.write(grant, (0, 100))
    writer = books.begin(grant, (50, 60))
    assert not books.covered(0, 100) and books.covered(0, 50) and books.covered(60, 100)
    books.ledger.verify(writer, books.sums(writer))
    assert books.covered(0, 100)


def test_a_failed_writer_takes_back_what_was_covered(books: Books) -> None:
    grant = books.grant((0, 100))
    books.write(grant, (0, 100))
    books.ledger.fail(books.begin(grant, (50, 60)))
    assert not books.covered(0, 100) and books.covered(0, 50) and books.covered(60, 100)


def test_only_the_span_with_a_wrong_checksum_is_bad(books: Books) -> None:
    writer = books.begin(books.grant((0, 100)), (0, 10), (20, 30), (40, 50))
    good = books.sums(writer)
    assert books.ledger.verify(writer, [good[0], good[1] ^ 1, good[2]]) == [1]
    assert books.covered(0, 10) and not books.covered(20, 30) and books.covered(40, 50)
    assert books.ledger.corrupt_spans == 1


def test_without_checksums_what_was_written_counts(books: Books) -> None:
    assert books.ledger.verify(books.begin(books.grant((0, 100)), (0, 10), (20, 30)), []) == []
    assert books.covered(0, 10)


def test_a_grant_for_one_peer_serves_no_other(books: Books) -> None:
    for peer, admitted in (("s", True), ("other", False)):
        grant = books.ledger.grant(OperationId(peer), [of(0, 10)], ttl_s=10.0, peer=WorkerId(peer))
        if admitted:
            books.ledger.fail(books.begin(grant, (0, 10)))
        else:
            with pytest.raises(Refused, match="for other, not for s"):
                books.begin(grant, (0, 10))
        books.ledger.revoke(OperationId(peer), lambda: None)


def test_grants_are_numbered(books: Books) -> None:
    assert [books.grant((0, 10)).generation, books.grant((0, 10)).generation] == [1, 2]


def test_a_retired_segment_is_quiet_once_its_writers_are_gone_and_takes_no_new_ones(books: Books) -> None:
    grant, told = books.grant((0, 100)), []
    books.write(grant, (50, 60))
    writer = books.begin(grant, (0, 10))
    books.ledger.retire("kv", lambda: told.append("quiet"))
    assert books.condemned == ["segment kv was unregistered"] and not told
    with pytest.raises(Refused, match="outside the grant"):
        books.begin(grant, (20, 30))
    books.ledger.fail(writer)
    assert told == ["quiet"]
    assert not books.covered(50, 60)
    books.ledger.revoke(OP, lambda: told.append("released"))
    assert told == ["quiet", "released"]



@pytest.mark.parametrize("change", [
    {"token": b"x" * 32}, {"operation": OperationId("other")}, {"incarnation": Incarnation("former")},
])
def test_a_changed_grant_is_refused(books: Books, change: dict[str, object]) -> None:
    grant = msgspec.structs.replace(books.grant((0, 100)), **change)
    with pytest.raises(Refused):
        books.begin(grant, (0, 10))
    assert books.ledger.refused_claims == 1


def test_what_the_sender_says_about_ranges_and_expiry_counts_for_nothing(books: Books) -> None:
    grant = msgspec.structs.replace(books.grant((0, 100), ttl_s=10), ranges=[of(0, 1000)], expires_at_s=1e9)
    with pytest.raises(Refused, match="outside"):
        books.begin(grant, (0, 101))
    books.clock.advance(10)
    with pytest.raises(Refused, match="expired"):
        books.begin(grant, (0, 10))


def test_a_span_may_cross_granted_neighbours_but_no_gap(books: Books) -> None:
    books.begin(books.grant((0, 100), (100, 200), (300, 400)), (50, 150))
    with pytest.raises(Refused, match="outside"):
        books.begin(books.grant((0, 100), (100, 200), (300, 400)), (150, 350))


def test_one_grant_does_not_lend_its_ranges_to_another(books: Books) -> None:
    first, second = books.grant((0, 100)), books.grant((100, 200))
    books.begin(first, (0, 100))
    with pytest.raises(Refused, match="outside"):
        books.begin(first, (100, 110))
    books.begin(second, (100, 110))


def test_a_range_belongs_to_one_operation_until_it_is_released(books: Books) -> None:
    books.grant((0, 100))
    books.grant((50, 60))
    with pytest.raises(Bug, match="granted to operation op"):
        books.grant((99, 101), operation=OperationId("other"))
    books.ledger.revoke(OP, lambda: None)
    books.grant((99, 101), operation=OperationId("other"))


@pytest.mark.parametrize("bounds", [(-1, 10), (990, 1001), (20, 10)])
def test_bytes_we_do_not_have_cannot_be_granted(books: Books, bounds: tuple[int, int]) -> None:
    with pytest.raises(Bug):
        books.grant(bounds)


def test_release_waits_for_the_last_writer(books: Books) -> None:
    grant, quiet = books.grant((0, 100)), []
    first, second = books.begin(grant, (0, 10)), books.begin(grant, (20, 30))
    books.ledger.revoke(OP, lambda: quiet.append("first"))
    books.ledger.revoke(OP, lambda: quiet.append("second"))
    with pytest.raises(Refused, match="released"):
        books.begin(grant, (40, 50))
    with pytest.raises(Bug, match="being released"):
        books.grant((0, 100))
    books.ledger.verify(first, books.sums(first))
    assert quiet == []
    books.ledger.fail(second)
    assert quiet == ["first", "second"]
    assert not books.covered(0, 10)


def test_a_released_token_stays_dead_when_the_same_is_granted_again(books: Books) -> None:
    former = books.grant((0, 100))
    books.ledger.revoke(OP, lambda: None)
    books.grant((0, 100))
    with pytest.raises(Refused, match="token"):
        books.begin(former, (0, 10))


def test_releasing_what_was_never_granted_is_quiet_at_once(books: Books) -> None:
    quiet: list[bool] = []
    books.ledger.revoke(OperationId("never"), lambda: quiet.append(True))
    assert quiet == [True]


def test_writers_past_their_deadline_are_overdue(books: Books) -> None:
    writer = books.begin(books.grant((0, 100)), (0, 10))
    assert books.ledger.overdue(books.clock.monotonic()) == []
    books.clock.advance(1.0)
    assert books.ledger.overdue(books.clock.monotonic()) == [writer]


def test_a_writer_that_fails_while_we_verify_makes_us_read_again(books: Books,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    grant = books.grant((0, 100))
    writer, torn = books.begin(grant, (0, 10)), books.begin(grant, (5, 15))
    good, reads = books.sums(writer), []

    def fail_the_other_meanwhile(data: object) -> int:
        reads.append(1)
        if len(reads) == 1:
            books.segment.array[7] = 99  # the last byte the other one wrote
            books.ledger.fail(torn)
            return good[0]
        return checksum(books.segment.array[0:10])

    monkeypatch.setattr("shared.transfer.ledger.checksum", fail_the_other_meanwhile)
    assert books.ledger.verify(writer, good) == [0]
    assert len(reads) == 2 and not books.covered(0, 10)


def test_a_writer_without_checksums_is_not_believed_once_another_failed_where_it_writes(books: Books) -> None:
    grant = books.grant((0, 100))
    writer, apart, late = books.begin(grant, (0, 10)), books.begin(grant, (50, 60)), books.begin(grant, (5, 15))
    books.segment.array[0:10] = 1
    books.segment.array[7] = 99  # by the other one, whose source is something else by now
    books.ledger.fail(late)
    assert books.ledger.verify(writer, []) == [0] and not books.covered(0, 1)
    assert books.ledger.verify(apart, []) == [] and books.covered(50, 60)


def test_what_is_covered_when_an_operation_is_shut_stays_so(books: Books) -> None:
    grant = books.grant((0, 100))
    books.write(grant, (0, 50))
    late = books.begin(grant, (40, 60))
    books.ledger.shut(OP)
    assert books.covered(0, 40) and not books.covered(0, 50), "somebody is writing there still"
    with pytest.raises(Refused, match="released"):
        books.begin(grant, (0, 10))
    with pytest.raises(Bug, match="being released"):
        books.grant((0, 10))
    assert books.ledger.verify(late, books.sums(late)) == [] and books.covered(0, 60)
    quiet: list[bool] = []
    books.ledger.revoke(OP, lambda: quiet.append(True))
    assert quiet and not books.covered(0, 10)
    books.ledger.shut(OP)
    books.grant((0, 100), operation=OperationId("next"))
