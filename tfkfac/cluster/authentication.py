"""Authenticate the workers and worker 0 to each other by a shared secret.

Each side proves that it knows the secret by HMAC-SHA256 over its role, the
whole greeting and a fresh random number (nonce) of each side. The keys of
later messages are derived by the same HMAC, one key for each direction.
Without a secret the HMAC has an empty key. The proof then only shows that the
peer speaks this protocol.
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

SECRET_VARIABLE = "TFKFAC_SECRET"
# Roles of the two ends of a connection. Each HMAC covers the sender's role.
WORKER_0, PEER = "worker 0", "peer of worker 0"
_NONCE_BYTES = 16


def read_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of the job from `TFKFAC_SECRET`; b"" if it is unset.

    A value that begins with "/" is the path of a file that contains the secret.
    """
    value = environment.get(SECRET_VARIABLE, "").strip()
    if not value.startswith("/"):
        return value.encode(errors="surrogateescape")
    cause = "the file is empty"
    try:
        secret = pathlib.Path(value).read_bytes().strip()
    except OSError as error:
        secret, cause = b"", str(error.strerror)
    if not secret:
        # Do not print the value: it may be a secret that begins with "/".
        raise ValueError(
            f"Environment variable `{SECRET_VARIABLE}` must be a secret, or "
            f"the path of a file with one. Received: a value that begins with "
            f"'/', hence a path ({cause})"
        )
    return secret


def make_nonce() -> str:
    """Return a fresh random number in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


@dataclasses.dataclass(frozen=True)
class Greeting:
    """First message of a peer to worker 0. The field names are JSON keys.

    Attributes:
        worker: Index of the peer.
        cluster: Addresses of all workers; "" for each address that the peer
            does not know.
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
        """Parse and validate the greeting in a received message.

        The text of the ValueError does not quote the message.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if message.keys() != names:
            raise ValueError("it is not a greeting of this version of tfkfac")
        index, addresses = message["worker"], message["cluster"]
        knock, texts = message["knock"], ("job", "process", "nonce")
        if not all(isinstance(message[name], str) for name in texts):
            raise ValueError("job, process and nonce must be strings")
        if type(knock) is not bool or type(index) is not int:
            raise ValueError("knock must be a bool, the index an integer")
        if not isinstance(addresses, list) or not all(
            isinstance(address, str) for address in addresses
        ):
            raise ValueError("the cluster must be a list of strings")
        if not 0 <= index < len(addresses) or (index == 0) != knock:
            raise ValueError("the index must be of a worker except worker 0")
        try:
            for i, address in enumerate(addresses):
                if address or i in (0, index):
                    split_address(address)
        except ValueError:
            raise ValueError("an address is not 'host:port'") from None
        return cls(**{**message, "cluster": tuple(addresses)})


class Session:
    """Message keys of one connection, and proofs of the shared secret."""

    def __init__(self, secret: bytes, greeting: Greeting, nonce: str) -> None:
        self._secret = secret
        content = [dataclasses.asdict(greeting), nonce]
        self._transcript = json.dumps(content, sort_keys=True)

    def prove(self, role: str) -> str:
        """Return the proof of the secret that `role` sends to the other end."""
        return self._derive("proof", role).hex()

    def verify(self, role: str, proof: object) -> bool:
        """Return True if `proof` is the proof that `role` must send."""
        if not isinstance(proof, str):
            return False
        return hmac.compare_digest(
            self.prove(role).encode(), proof.encode(errors="replace")
        )

    def key(self, role: str) -> bytes:
        """Return the MAC key of the messages that `role` sends."""
        return self._derive("key", role)

    def _derive(self, use: str, role: str) -> bytes:
        signed_text = "\n".join(["tfkfac", use, role, self._transcript])
        return hmac.digest(self._secret, signed_text.encode(), hashlib.sha256)


def sign(key: bytes, number: int, text: bytes) -> bytes:
    """Return the MAC of a message and its sequence number, in hexadecimal."""
    content = number.to_bytes(8, "big") + text
    return hmac.digest(key, content, hashlib.sha256).hex().encode()
