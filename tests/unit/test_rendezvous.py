"""The ranks agree on versions and code before they wait for each other."""

from support.cluster.context import _describe_differing_rank


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
