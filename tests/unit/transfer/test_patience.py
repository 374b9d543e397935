"""How long a peer that says nothing is waited for: the numbers, where a clock would only measure the machine."""

from __future__ import annotations

import socket

import pytest

from shared.transfer import TransferSettings, rdma, verbs
from shared.transfer.wire import keep_alive


def test_a_card_gives_a_dead_peer_up_within_two_seconds() -> None:
    assert rdma.TIMING.silence_s == pytest.approx(0.403, abs=1e-3)
    assert rdma.TIMING.retries < 7, "for ever, on some devices"
    assert rdma.TIMING.silence_s * verbs.SLACK < 2, "the slowest device"
    assert rdma.TIMING.silence_s * 2 < 2, "a second rail, tried in vain"


@pytest.mark.parametrize("gone_s", [20.0, rdma.GONE_S])
def test_what_a_dead_host_does_not_acknowledge_ends_the_connection(gone_s: float) -> None:
    with socket.socket() as sock:
        keep_alive(sock, gone_s=gone_s)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == gone_s * 1000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle_s + sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) <= 2 * gone_s


def test_the_control_connection_of_rdma_is_given_up_within_two_seconds() -> None:
    assert rdma.GONE_S < 2


def test_a_deadline_grows_with_the_size_and_ends() -> None:
    settings = TransferSettings(min_timeout_s=2.0, min_bytes_per_s=1e6)
    assert [settings.timeout_s(nbytes) for nbytes in (0, 10**6, 10**7, 10**12)] == [2, 3, 12, 600]
    assert settings.timeout_s(10**7, 0.5) == 0.5
