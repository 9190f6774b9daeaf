"""Ports of 127.0.0.1 that several processes of tests share out."""

import random
import socket

# Below those that Linux gives to outgoing connections.
RANGE = range(10_000, 32_000)


def claim_ports(count: int) -> list[socket.socket]:
    """Ports for TCP servers that start later, in other processes.

    A socket for UDP holds each until it is closed: nobody else who calls this
    gets the port, and yet a server can bind it.
    """
    held: list[socket.socket] = []
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        if len(held) == count:
            break
        if (claim := _claim(port)) is not None:
            held.append(claim)
    return held


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        claim.bind(("127.0.0.1", port))
        with socket.socket() as server:
            # TensorFlow's servers listen on all addresses.
            server.bind(("", port))
    except OSError:
        claim.close()
        return None
    return claim


def address(claim: socket.socket) -> str:
    """The "host:port" that a socket of `claim_ports` holds."""
    return f"127.0.0.1:{claim.getsockname()[1]}"
