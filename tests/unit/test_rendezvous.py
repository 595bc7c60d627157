"""The ranks agree on versions and code before they wait for each other."""

import socket

import pytest

from support.cluster import rendezvous
from support.cluster.launch import Launch
from support.cluster.rendezvous import _describe_differing_rank, _describe_missing_ranks
from support.errors import TrainingError


def test_a_library_that_a_rank_lacks_is_named():
    """Also one that only rank 0 has."""
    versions = {"torch": "2.13.0", "deepspeed": "0.19.8"}
    ranks = {0: {"host": "a", "facts": versions}, 1: {"host": "b", "facts": {"torch": "2.13.0"}}}
    assert "Rank 1 on b" in _describe_differing_rank(
        ranks
    ) and "deepspeed missing" in _describe_differing_rank(ranks)
    ranks[0], ranks[1] = {**ranks[1], "host": "a"}, {**ranks[0], "host": "b"}
    assert "0.19.8" in _describe_differing_rank(
        ranks
    ) and "missing on a" in _describe_differing_rank(ranks)
    assert _describe_differing_rank({0: ranks[0], 1: {**ranks[0], "host": "b"}}) == ""


def test_missing_ranks_are_named_without_a_guess_of_their_node():
    """With 3 tasks on the first node and 1 on the second, rank 2 is not on node 2 // 1."""
    launch = Launch("srun", 0, 0, 4, 3, 0, "a", 29500)
    seen = {0: {"host": "a"}, 1: {"host": "a"}, 3: {"host": "b"}}
    message = _describe_missing_ranks([2], seen, launch)
    assert "1 of 4 ranks have not arrived (rank 2)" in message and "are on a, b." in message
    assert "a:29500" in message and "node" not in message
    message = _describe_missing_ranks(list(range(1, 12)), {0: {"host": "a"}}, launch)
    assert "(ranks 1, 2, 3, 4, 5, 6, 7, 8, …)" in message


def test_a_name_that_had_an_address_is_looked_up_again(monkeypatch):
    """While rank 0 starts, it refuses connections, and a look-up may fail once."""
    now = iter(range(0, 10_000, 50))
    errors = iter([ConnectionRefusedError(), ConnectionRefusedError(), socket.gaierror()])

    def connect(*_):
        if error := next(errors, None):
            raise error
        return socket.socket()

    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: None)
    monkeypatch.setattr(rendezvous.socket, "create_connection", connect)
    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *args, **options: args)
    launch = Launch("python", 1, 1, 2, 2, 0, "a", 29500)
    assert rendezvous.connect(launch, timeout=1000) == ("a", 29500, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_without_an_address_ends_the_run(monkeypatch, rank):
    """Also of the rank that hosts the store: torch would wait for the name until its timeout."""
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0)
    launch = Launch("python", rank, rank, 2, 2, 0, "no-such-host.invalid", 29500)
    with pytest.raises(TrainingError, match=r"no-such-host\.invalid, .* has no address here"):
        rendezvous.connect(launch, timeout=300)
