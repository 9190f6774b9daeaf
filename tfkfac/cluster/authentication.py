"""Greeting of a worker, proof of a shared secret, keys for later messages.

Each side proves the secret by HMAC-SHA256 over its role, the whole greeting
and a fresh random number (nonce) of each side. Keys of later messages are
derived in the same way, one for each direction. Without a secret the HMAC has
an empty key: it proves no more than that the peer speaks this protocol.
"""

import dataclasses
import hashlib
import hmac
import json
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from tfkfac.cluster.config import split_address

VARIABLE = "TFKFAC_SECRET"
# Roles: the sender of a proof or of messages.
FIRST, OTHER = "worker 0", "peer of worker 0"
_NONCE_BYTES = 16


def read_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of the job; b"" if there is none.

    A value that begins with "/" is the path of a file with the secret.

    Raises:
        ValueError: If the file cannot be read or is empty.
    """
    value = environment.get(VARIABLE, "").strip()
    if not value.startswith("/"):
        return value.encode(errors="surrogateescape")
    cause = "the file is empty"
    try:
        secret = pathlib.Path(value).read_bytes().strip()
    except OSError as error:
        secret, cause = b"", str(error.strerror)
    if not secret:
        # Do not print the value: it may be a secret after all.
        raise ValueError(
            f"Environment variable `{VARIABLE}` must be a secret, or the path "
            f"of a file with one. Received: a value that begins with '/', "
            f"hence a path ({cause})"
        )
    return secret


def make_nonce() -> str:
    """Return a fresh random number in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


@dataclasses.dataclass(frozen=True)
class Greeting:
    """The first message of a peer to worker 0.

    Attributes:
        worker: Index of the peer.
        cluster: Addresses of all workers, including that of the peer; "" if
            the peer does not know an address.
        job: Identity of the peer's job; "" if unknown.
        process: Random number of the process, equal in all its greetings.
        nonce: Fresh random number of this greeting.
        knock: True if the sender is another worker 0 whose port is in use.
    """

    worker: int
    cluster: tuple[str, ...]
    job: str
    process: str
    nonce: str
    knock: bool = False

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Greeting":
        """Check a message of an unknown peer.

        Raises:
            ValueError: If the message is not a greeting. The error text
                contains nothing of the message.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if message.keys() != names:
            raise ValueError("it is not a greeting of this version of tfkfac")
        index, addresses = message["worker"], message["cluster"]
        knock = message["knock"]
        job, process, nonce = (
            message[name] for name in ("job", "process", "nonce")
        )
        if not all(isinstance(text, str) for text in (job, process, nonce)):
            raise ValueError("job, process and nonce must be strings")
        if type(knock) is not bool or type(index) is not int:
            raise ValueError("the index must be an integer")
        if not isinstance(addresses, list) or not all(
            isinstance(address, str) for address in addresses
        ):
            raise ValueError("the cluster must be a list of strings")
        if not 0 <= index < len(addresses) or (index == 0) != knock:
            raise ValueError("the index must be of a worker beside worker 0")
        for i, address in enumerate(addresses):
            if address or i in (0, index):
                _check_address(address)
        return cls(index, tuple(addresses), job, process, nonce, knock)


def _check_address(address: str) -> None:
    try:
        split_address(address)
    except ValueError:
        raise ValueError("an address is not 'host:port'") from None


class Session:
    """Proofs and keys of one connection.

    Args:
        secret: The secret of the job, or b"".
        greeting: The first message of the peer to worker 0.
        nonce: The nonce of worker 0.
    """

    def __init__(self, secret: bytes, greeting: Greeting, nonce: str) -> None:
        self._secret = secret
        content = [dataclasses.asdict(greeting), nonce]
        self._transcript = json.dumps(content, sort_keys=True)

    def prove(self, role: str) -> str:
        """Return the proof of the secret by one of the two roles."""
        return self._derive("proof", role).hex()

    def is_proved(self, role: str, proof: object) -> bool:
        """Return True if `proof` is that of the role."""
        if not isinstance(proof, str):
            return False
        return hmac.compare_digest(
            self.prove(role).encode(), proof.encode(errors="replace")
        )

    def key(self, role: str) -> bytes:
        """Return the key of the messages that the role sends."""
        return self._derive("key", role)

    def _derive(self, use: str, role: str) -> bytes:
        text = "\n".join(["tfkfac", use, role, self._transcript])
        return hmac.digest(self._secret, text.encode(), hashlib.sha256)


def sign(key: bytes, number: int, text: bytes) -> bytes:
    """Return the MAC, in hexadecimal digits, of message `number` of a key."""
    content = number.to_bytes(8, "big") + text
    return hmac.digest(key, content, hashlib.sha256).hex().encode()
