"""Which addresses the mesh calls: no metadata service, however it is written, and every address that a mesh runs on."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.cli import _chosen
from services.security.addresses import AddressRefusedError, check_resolved, check_url, why_refused

METADATA = "169.254.169.254"
REFUSED = [
    METADATA,
    "169.254.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "224.0.0.1",
    "255.255.255.255",
    "fe80::1",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "fd00:ec2::254%eth0",
    "fd20:ce::254",
    "ff02::1",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
]
CALLED = [
    "127.0.0.1",
    "10.0.0.5",
    "192.168.1.1",
    "172.17.0.2",
    "8.8.8.8",
    "::1",
    "fd00::5",
    "2001:db8::1",
    "100.64.0.1",
]


@pytest.mark.parametrize("address", REFUSED)
def test_what_no_engine_is_called_at(address: str) -> None:
    assert why_refused(address)
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(AddressRefusedError, match="is not called"):
        check_url(f"http://{host}:80")
    with pytest.raises(AddressRefusedError):
        check_resolved("http://engine-0:8100", ["10.0.0.5", address])


@pytest.mark.parametrize("address", CALLED)
def test_what_a_mesh_runs_on(address: str) -> None:
    assert why_refused(address) is None
    host = f"[{address}]" if ":" in address else address
    assert check_url(f"https://{host}") == (address, 443)
    check_resolved("http://engine-0:8100", [address])


@given(st.integers(0, (1 << 16) - 1))
def test_link_local_addresses_are_refused_in_every_form(rest: int) -> None:
    plain = ipaddress.IPv4Address((169 << 24) + (254 << 16) + rest)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) + int(plain))
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) + int(plain))
    assert all(why_refused(str(each)) for each in (plain, mapped, nat64))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "http://",
        "http://a:b@c",
        "http://a@169.254.169.254",
        "http://a?x=1",
        "http://a#x",
        "a:80",
        "http://[::1",
        "http://a:x",
    ],
)
def test_what_is_no_address_of_a_service(url: str) -> None:
    with pytest.raises(AddressRefusedError, match="is no "):
        check_url(url)


@given(st.text())
def test_any_text_is_an_address_or_refused(url: str) -> None:
    for each in (url, f"http://{url}"):
        try:
            host, port = check_url(each)
        except AddressRefusedError:
            continue
        assert host and 0 <= port < 1 << 16


def test_the_engine_of_another_is_not_looked_for_at_a_metadata_service() -> None:
    with pytest.raises(AddressRefusedError):
        _chosen("http", f"http://{METADATA}/latest", None)
    assert _chosen("http", "http://10.0.0.5:8000", None) == "http"
