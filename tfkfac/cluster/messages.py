"""Messages of the rendezvous, with proofs that the sender has the secret.

Each message carries an HMAC-SHA256 of its content and the role of the sender.
The content includes fresh random numbers (nonces): a request has the nonce of
the session that worker 0 has chosen, a reply the nonce of its request. So no
message can be used again for another start or as another reply. Without a
secret the HMAC has an empty key; it then only shows that the sender speaks this
protocol.
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

Message = dict[str, Any]

SERVICE, JOIN = "tfkfac.Rendezvous", "Join"  # names in gRPC
METHOD = f"/{SERVICE}/{JOIN}"
SECRET_VARIABLE = "TFKFAC_SECRET"
# Roles of the sender. Each HMAC covers the role.
WORKER_0, PEER = "worker 0", "peer of worker 0"


def read_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of the job from `TFKFAC_SECRET`; b"" if it is unset."""
    value = environment.get(SECRET_VARIABLE, "").strip()
    if not value.startswith("/"):  # else it is the path of a file
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
    return secrets.token_hex(16)


def encode(content: Message, secret: bytes, role: str) -> bytes:
    """Serialize a message with the HMAC of its sender."""
    text = json.dumps(content)
    return json.dumps([text, _sign(text, secret, role)]).encode()


def decode(data: bytes, secret: bytes, role: str) -> tuple[Message, bool]:
    """Parse a message; also return True if its HMAC is valid."""
    try:
        text, signature = json.loads(data)
        content = json.loads(text)
        expected = _sign(text, secret, role)
        is_valid = hmac.compare_digest(expected.encode(), signature.encode())
    except (ValueError, TypeError, AttributeError, RecursionError):
        # Any program may have sent the message: do not quote it.
        raise ValueError("it is not a message of the rendezvous") from None
    if not isinstance(content, dict):
        raise ValueError("it is not an object of JSON")
    return content, is_valid


def _sign(text: str, secret: bytes, role: str) -> str:
    signed = "\n".join(["tfkfac", role, text]).encode(errors="replace")
    return hmac.digest(secret, signed, hashlib.sha256).hex()


@dataclasses.dataclass(frozen=True)
class Greeting:
    """Request of a worker to worker 0. The field names are JSON keys."""

    worker: int  # index of the sender; 0 if it is another worker 0
    cluster: tuple[str, ...]  # addresses of all workers; "" if unknown
    port: int  # port of the sender, if its address in the cluster is ""
    job: str  # identity of the sender's job; "" if unknown
    process: str  # random number of the process, equal in all its requests
    session: str  # nonce of worker 0; "" in the first request
    nonce: str  # fresh random number of this request

    @classmethod
    def read(cls, content: Message) -> "Greeting":
        """Validate the content of a request; raise a ValueError."""
        types: dict[str, type] = {x.name: str for x in dataclasses.fields(cls)}
        types |= {"worker": int, "cluster": list, "port": int}
        if content.keys() != types.keys():
            raise ValueError("it is not a greeting of this version of tfkfac")
        cluster = content["cluster"]
        has_types = all(type(content[name]) is types[name] for name in types)
        if not has_types or not all(isinstance(x, str) for x in cluster):
            raise ValueError("it has a value of a wrong type")
        greeting = cls(**content | {"cluster": tuple(cluster)})
        if not 0 <= greeting.worker < len(greeting.cluster):
            raise ValueError("its index is not that of a worker")
        own_address = greeting.cluster[greeting.worker]
        # `split_address` checks the port, here of any host.
        split_address(own_address or f"host:{greeting.port}")
        return greeting
