"""Rendezvous of all workers before TensorFlow starts.

TensorFlow's start prints nothing and has no timeout: if a worker is missing,
or two have the same index, all others wait for ever. Therefore the workers
first call worker 0 by gRPC, at the address which TensorFlow uses afterwards.
Worker 0 starts all workers when all have called.

A worker must know only the address of worker 0. It sends its port, and receives
the addresses of all workers from worker 0.

A worker repeats its request, a `Greeting`. The replies of worker 0 are
"session" (its nonce, which the next request must have), "missing" (wait for
these workers), "go", "timeout" and "refused".
"""

import dataclasses
import os
import secrets
import socket
import time

import grpc

from tfkfac.cluster import waiting
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.coordinator import Coordinator
from tfkfac.cluster.messages import (
    METHOD,
    PEER,
    SECRET_VARIABLE,
    WORKER_0,
    Greeting,
    Message,
    decode,
    encode,
    make_nonce,
    read_secret,
)
from tfkfac.cluster.waiting import RefusedError, Wait, escape

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # Do not share connections, and their delays after a failure.
    ("grpc.use_local_subchannel_pool", 1),
]


def wait_for_all(
    cluster: Cluster, timeout: float | None
) -> tuple[Cluster, int | None]:
    """Wait until all workers have called this function.

    Returns the cluster with the addresses of all workers, and a random integer
    in [0, 2^31) that is equal on all workers; None if there is one worker.

    Raises:
        TimeoutError: If a worker does not call in time.
        RefusedError: If worker 0 refuses this worker, because it has another
            cluster, job or secret, or the index of another process.
    """
    if len(cluster.addresses) == 1:
        return cluster, None
    secret, wait = read_secret(os.environ), Wait(cluster, timeout)
    client = _Client(cluster, secret, wait)
    if cluster.index > 0:
        addresses, seed = client.join()
    else:
        coordinator = Coordinator(cluster, secret, wait)
        # The server ends before TensorFlow needs the port.
        with coordinator.serve(client.probe):
            try:
                coordinator.wait_for_all()
            except (RefusedError, TimeoutError) as error:
                is_refused = isinstance(error, RefusedError)
                key = "refused" if is_refused else "timeout"
                coordinator.end({key: str(error)})
                raise
            addresses, seed = coordinator.addresses, secrets.randbits(31)
            coordinator.end({"go": addresses, "seed": seed})
    return dataclasses.replace(cluster, addresses=tuple(addresses)), seed


class _Client:
    """Requests of this process to worker 0."""

    def __init__(self, cluster: Cluster, secret: bytes, wait: Wait) -> None:
        self._cluster = cluster
        self._secret = secret
        self._wait = wait
        self._greeting = Greeting(
            worker=cluster.index,
            cluster=cluster.addresses,
            port=1,
            job=cluster.job,
            process=make_nonce(),
            session="",
            nonce="",
        )

    def probe(self) -> str:
        """On worker 0, return the job of another worker 0 at the same port."""
        return escape(str(self._call().get("waiting", "")))

    def join(self) -> tuple[list[str], int]:
        """Repeat the request until worker 0 sends all addresses and a seed."""
        size = len(self._cluster.addresses)
        with socket.socket() as port_holder:
            port_holder.bind(("", 0))  # reserve a port for TensorFlow
            port = port_holder.getsockname()[1]
            self._greeting = dataclasses.replace(self._greeting, port=port)
            while True:
                missing = [0]
                match self._call():
                    case {"refused": str(text)}:
                        raise RefusedError(escape(text))
                    case {"timeout": str(text)}:
                        raise TimeoutError(escape(text))
                    case {"go": list(addresses), "seed": int(seed)}:
                        return addresses, seed
                    case {"unreachable": str(text)}:
                        self._wait.cause = escape(text)
                    case {"missing": list(received)}:
                        self._wait.cause = ""
                        valid = range(size)
                        missing = [i for i in received if i in valid] or [0]
                self._wait.check(missing)
                interval_s = waiting.request_interval_s(size)
                time.sleep(self._wait.remaining(interval_s))

    def _call(self) -> Message:
        """Send a request to worker 0; return its reply, or "unreachable"."""
        reply = self._send()
        if isinstance(session := reply.get("session"), str):
            self._greeting = dataclasses.replace(
                self._greeting, session=session
            )
            reply = self._send()
        return reply

    def _send(self) -> Message:
        greeting = dataclasses.replace(self._greeting, nonce=make_nonce())
        data = encode(dataclasses.asdict(greeting), self._secret, PEER)
        address = self._cluster.addresses[0]
        try:
            with grpc.insecure_channel(address, _OPTIONS) as channel:
                answer = channel.unary_unary(METHOD)(
                    data, timeout=self._wait.remaining(waiting.TIMEOUT_S)
                )
            reply, is_authentic = decode(answer, self._secret, WORKER_0)
        except grpc.RpcError as error:
            # Keep the previous cause if the request has exceeded its deadline.
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            cause = self._wait.cause if is_late else error.details()
            return {"unreachable": cause or "no answer"}
        except ValueError:
            return {"unreachable": "another program answers at its address"}
        if not is_authentic or reply.get("nonce") != greeting.nonce:
            raise RefusedError(
                f"{self._cluster.name(0)} cannot prove that it has the secret "
                f"of this process: environment variable {SECRET_VARIABLE} must "
                "be the same on all workers of a job, or unset on all. It may "
                "be worker 0 of another job. Received: "
                f"{'a' if self._secret else 'no'} secret on worker "
                f"{self._cluster.index}, another one or none on worker 0"
            )
        return reply
