"""--show_sample: a training sequence as tokens."""

from tokenizer_zoo import tokenizer_of

from tools.check.show_sample import describe


def test_an_untrained_end_token_whose_id_is_that_of_the_padding_is_shown():
    tokenizer = tokenizer_of("gpt2")
    lines = describe([5, 6, 0], [-100, 6, -100], tokenizer)
    assert len(lines) == 2 + 3 and repr(tokenizer.decode([0])) in lines[-1]
