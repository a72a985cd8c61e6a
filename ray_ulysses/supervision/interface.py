"""Finds the network interface through which this node reaches another one."""

from __future__ import annotations

import socket

import psutil


def interface_towards(host: str, port: int) -> str | None:
    """Return the name of the interface whose address this node has towards another; None if it can't be told.

    Gloo otherwise takes the address that the node's own name resolves to. Debian and many images resolve it to
    127.0.0.1 or 127.0.1.1, at which no other node reaches this one.

    Args:
        host: The other node's name or address; it may be this one.
        port: Any port; nothing is sent to it.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            # Connecting such a socket only looks the route up.
            towards.connect(address)
            own: str = towards.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == family and one.address.partition("%")[0] == own for one in addresses):
            return str(name)
    return None
