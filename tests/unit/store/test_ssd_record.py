"""A slot's record: known bytes, back and forth, and no damage goes unnoticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import BlockKey
from shared.kv import Tier
from shared.messages import StoredBlock
from shared.store.ssd.record import EMPTY, RECORD_BYTES, Damaged, Record, decode, encode, fits

KNOWN = Record(
    StoredBlock(key=BlockKey(bytes(range(32))), parent=BlockKey(bytes(range(32, 64))), depth=3, nbytes=2_949_120,
                tier=Tier.SSD, origin="received", tenant="acme", tokens=64),
    generation=7, payload_xxh3=0x0123456789ABCDEF)
GOLDEN = bytes.fromhex(
    "4d4253520100010007000000000000000001020304050607"
    "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
    "0300000040000000" "00002d0000000000" "efcdab8967452301" "0400" "61636d65") + bytes(124 + 14)

records = st.builds(
    lambda key, parent, depth, nbytes, received, tenant, tokens, generation, checksum: Record(
        StoredBlock(key=BlockKey(key), parent=BlockKey(parent), depth=depth, nbytes=nbytes, tier=Tier.SSD,
                    origin="received" if received else "computed", tenant=tenant, tokens=tokens), generation, checksum),
    st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1), st.booleans(), st.text(max_size=32), st.integers(0, 2**32 - 1),
    st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))


def test_the_layout_stays() -> None:
    raw = encode(KNOWN)
    assert len(raw) == RECORD_BYTES and raw[:248] == GOLDEN
    assert decode(raw) == KNOWN


@given(records)
def test_what_is_written_is_read(record: Record) -> None:
    assert decode(encode(record)) == record


@given(records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_flipped_bit_is_found(record: Record, bit: int) -> None:
    raw = bytearray(encode(record))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        decode(bytes(raw))


@given(st.binary(max_size=RECORD_BYTES + 8))
def test_anything_else_is_damaged(raw: bytes) -> None:
    if raw != EMPTY:
        with pytest.raises(Damaged):
            decode(raw)


def test_an_empty_slot_is_none_and_a_torn_record_is_damaged() -> None:
    assert decode(EMPTY) is None
    for cut in (1, 100, 255):
        with pytest.raises(Damaged):
            decode(encode(KNOWN)[:cut] + EMPTY[cut:])


def test_a_name_that_does_not_fit_is_known_before() -> None:
    block = KNOWN.block
    assert fits(block)
    assert not fits(StoredBlock(key=block.key, parent=block.parent, depth=0, nbytes=1, tenant="ä" * 65))
