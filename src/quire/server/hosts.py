"""Names and addresses of hosts. An engine reads it too, so it imports no server."""

from __future__ import annotations

import ipaddress


def loopback(host: str) -> bool:
    """Whether a name or an address, in brackets or not, is always this machine."""
    name = normalized(host)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def normalized(host: str) -> str:
    """A host as names are compared: lower case, without brackets and the dot of a fully qualified name."""
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
