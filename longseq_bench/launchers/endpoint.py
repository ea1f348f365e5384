"""The address at which node 0 listens, and the one at which other nodes find it."""

import ipaddress
import re
import socket
from typing import Any

import psutil

from longseq_bench.core.cluster_env import NodeInfo
from longseq_bench.core.errors import UserError

_LOCAL_INTERFACES = re.compile(r"lo|docker.*|br-.*|virbr.*|veth.*")
"""Interfaces that no other host reaches: the loopback, and networks of containers and machines."""


def is_loopback(address: str) -> bool:
    """Return True if no other host reaches a numeric address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_host(cluster: NodeInfo) -> str:
    """Return the host of the endpoint, or this host's own address instead of a misleading name.

    Some systems resolve their own name to a loopback address, which no other host reaches.

    Raises:
        UserError: the name does, this host has no or several other addresses, and the scheduler
            names no other host that shows which one is meant.
        OSError: the name does not resolve.
    """
    host = cluster.host
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return host
    except ValueError:
        pass
    _, address = resolve(host, cluster.port)
    if host.startswith(("localhost", "ip6-l")) or not is_loopback(address[0]):
        return host
    own = [address for address in _own_addresses() if not is_loopback(address)]
    if len(own) == 1:
        return own[0]
    if cluster.node == 0 and (source := _find_source(cluster.peer, cluster.port)):
        return source
    choice = f"one of {', '.join(own)}" if own else "an address that other hosts reach"
    raise UserError(
        f"{host} is a loopback address on this host; give --rdzv-endpoint {choice} instead"
    )


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the socket address of a host, which begins with a numeric address.

    Raises OSError if the name does not resolve.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # a part of the name is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is not a host name") from None
    return family, address


def stays_on_host(cluster: NodeInfo) -> bool:
    """Return True if the endpoint is a loopback address; False also if it does not resolve."""
    try:
        return is_loopback(resolve(find_host(cluster), cluster.port)[1][0])
    except (OSError, UserError):
        return False


def _find_source(peer: str, port: int) -> str:
    """Return the own address from which packets to another host leave; empty if none is known."""
    if not peer:
        return ""
    try:
        family, address = resolve(peer, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # of UDP: it chooses a route and sends no packet
            probe.connect(address)
            source: str = probe.getsockname()[0]
    except OSError:
        return ""
    found = ipaddress.ip_address(source.partition("%")[0])
    return "" if found.is_loopback or found.is_link_local else source


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host; without any, those of IPv6 except link-local ones.

    Only those of interfaces that are up and that other hosts may reach.
    """
    states = psutil.net_if_stats()
    found = [
        one
        for name, addresses in psutil.net_if_addrs().items()
        if not _LOCAL_INTERFACES.fullmatch(name) and (name not in states or states[name].isup)
        for one in addresses
    ]
    ipv6 = [one.address for one in found if one.family == socket.AF_INET6]
    return [one.address for one in found if one.family == socket.AF_INET] or [
        address for address in ipv6 if "%" not in address
    ]
