"""The address of node 0 on a host that resolves its own name to a loopback address, as Debian."""

import socket
from types import SimpleNamespace
from typing import Any, Self

import psutil
import pytest

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import UserError
from longseq_bench.launchers.endpoint import find_host

HOSTS = {"alpha": "127.0.1.1", "beta": "10.1.0.2", "gamma": "127.0.1.1"}
LO = {"lo": "127.0.0.1"}
TWO = {**LO, "eth0": "10.1.0.1", "ib0": "10.2.0.1"}


class Route:
    """A UDP socket of a host with two networks: 10.1.0.0/16 is behind eth0."""

    def __init__(self, family: int, kind: int) -> None:
        assert (family, kind) == (socket.AF_INET, socket.SOCK_DGRAM)

    def connect(self, address: tuple[str, int]) -> None:
        self.source = "10.1.0.1" if address[0].startswith("10.1.") else "127.0.0.1"

    def getsockname(self) -> tuple[str, int]:
        return self.source, 40000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        host.encode("idna")  # as the function of Python does
        if host not in HOSTS:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOSTS[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "socket", Route)


def set_interfaces(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str], down: str = ""
) -> None:
    found = {
        name: [SimpleNamespace(family=(socket.AF_INET, socket.AF_INET6)[":" in one], address=one)]
        for name, one in addresses.items()
    }
    states = {name: SimpleNamespace(isup=name != down) for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


@pytest.mark.parametrize("other", ["docker0", "br-1f2e", "virbr0", "vethab12", "eth1"])
@pytest.mark.parametrize("own", ["10.1.0.1", "fd00::1"])
def test_interfaces_that_no_other_host_reaches_are_left_out(
    monkeypatch: pytest.MonkeyPatch, other: str, own: str
) -> None:
    addresses = {**LO, "eth0": own, other: "172.17.0.1"}
    set_interfaces(monkeypatch, addresses, down="eth1")
    assert find_host(NodeInfo(2, 1, 0, "alpha", 29400)) == own


def test_of_two_addresses_that_towards_another_host_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_interfaces(monkeypatch, TWO)
    assert find_host(NodeInfo(2, 1, 0, "alpha", 29400, peer="beta")) == "10.1.0.1"


@pytest.mark.parametrize(
    ("node", "peer"),
    [(0, ""), (0, "gamma"), (0, "nowhere"), (1, "beta")],
)
def test_two_addresses_are_a_choice_where_no_other_host_decides(
    monkeypatch: pytest.MonkeyPatch, node: int, peer: str
) -> None:
    """On node 1 an own address would be that of another node than 0."""
    set_interfaces(monkeypatch, TWO)
    with pytest.raises(UserError, match=r"--rdzv-endpoint one of 10\.1\.0\.1, 10\.2\.0\.1 instead"):
        find_host(NodeInfo(2, 1, node, "alpha", 29400, peer=peer))


@pytest.mark.parametrize("name", ["node0..cluster", ".node0", "x" * 64])
def test_a_name_that_no_host_can_have_does_not_resolve(name: str) -> None:
    """It may come from a scheduler's variable, too."""
    with pytest.raises(OSError, match="is not a host name"):
        find_host(NodeInfo(2, 1, 0, name, 29400))
