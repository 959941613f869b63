"""How much of an n-gram match the draft model is given to verify."""

from fly.speculation.drafters.cascade import GuessPolicy


def test_a_guess_is_as_long_as_it_pays():
    free = GuessPolicy(lambda tokens: 1.0)
    assert free.choose([(4, 6)], 1, 1) == 6
    steep = GuessPolicy(lambda tokens: float(tokens))
    assert steep.choose([(4, 6)], 1, 1) == 0
    blocks = GuessPolicy(lambda tokens: 0.7 if tokens <= 4 else 1.3)
    assert blocks.choose([(4, 6)], 1, 1) == 3
    assert blocks.choose([(0, 0)], 1, 1) == 0


def test_guesses_learn_which_suffixes_can_be_trusted():
    policy = GuessPolicy(lambda tokens: 1 + tokens / 8)
    for _ in range(50):
        policy.observe(1, 6, 0)
        policy.observe(4, 6, 6)
    assert policy.choose([(1, 6)], 1, 1) == 0
    assert policy.choose([(4, 6)], 1, 1) == 6
    assert policy.choose([(4, 6), *[(0, 0)] * 7], 8, 1) == 0  # seven would only pay for it
