import socket

from tests.support.ports import address, claim_ports


def test_claimed_ports_are_free_and_nobody_elses() -> None:
    first, second = claim_ports(5), claim_ports(5)
    addresses = [address(claim) for claim in (*first, *second)]
    assert len(set(addresses)) == 10
    for claim in first:
        with socket.create_server(claim.getsockname()):
            pass
    for claim in (*first, *second):
        claim.close()
