"""Addresses as text."""

from __future__ import annotations

import pytest

from shared.transfer.addresses import DeviceAddress, join_address, split_address


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 80), ("::1", 65535), ("host.example", 1)])
def test_host_and_port(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "host", ":80", "host:eighty"])
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        split_address(text)


@pytest.mark.parametrize("address", [
    DeviceAddress("/tmp/a b/x.sock", "uuid-1", ("uuid-1",)),
    DeviceAddress("/tmp/#1/x.sock", "uuid-1", ("uuid-1", "uuid-2")),
])
def test_a_device_and_those_it_reaches(address: DeviceAddress) -> None:
    assert DeviceAddress.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "/tmp/x.sock", "/tmp/x.sock#uuid", "#uuid#uuid", "/tmp/x.sock##uuid"])
def test_what_is_no_device_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not socket#device"):
        DeviceAddress.parse(text)
