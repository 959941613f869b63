"""Where FLy defers nothing: the first places of an output, and what a pattern matches."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from fly import config
from fly.errors import FlyError
from fly.models.tokenizers import Texts
from fly.settings import FlySettings
from fly.speculation.rules.fly import FlyRule
from fly.speculation.rules.judged import JudgedDraft
from fly.speculation.rules.places import Places
from fly.speculation.running_text import RunningText
from tests import tiny

WORDS = ["yes", "no", " ", "7", ".", "a", "\n", "```", "`", "py", "x", "12,5", "3\n"]


def rule_with(**keys):
    keys = FlySettings(win_len=0, **keys)
    rule = FlyRule(keys)
    rule.places = Places.of(keys)
    return rule


def is_deferred(before, drafted, own, patterns, prompt="", **settings):
    """Whether the token is deferred after this text where the target's is another."""
    vocabulary = [drafted, own]
    judged = JudgedDraft(
        [0], [False], [True], [1, 1],
        texts=lambda tokens: (prompt, before + "".join(vocabulary[token] for token in tokens)),
    )  # fmt: skip
    rule = rule_with(exact_pattern=patterns, **settings)
    return rule.resolve(judged).deferred == (0,)


@pytest.mark.parametrize(
    ("before", "drafted", "own", "deferred"),
    [
        ("costs ", "4", "5", False),
        ("costs ", "about", "5", False),  # the target's number would not be written
        ("costs ", "5", "about", False),
        ("costs 3", " and", " or", True),
        ("costs 3", " and", "0", False),  # goes on with the number
        ("costs 3", ".", " or", False),
        ("costs 3,", "000", "500", False),
        ("costs 3, ", "or", "and", True),
        ("It has", " two", " some", True),
        ("It has", " 2x", " some", False),  # a token that holds a digit
    ],
)
def test_numbers(before, drafted, own, deferred):
    assert is_deferred(before, drafted, own, ("numbers",)) == deferred
    assert is_deferred(before, drafted, own, ("nothing like it", "numbers")) == deferred
    assert is_deferred(before, drafted, own, None)


@pytest.mark.parametrize(
    ("before", "deferred"),
    [
        ("Here:\n", True),
        ("Use ```x``` there, or", True),  # within a line
        ("Here:\n```python\n", False),
        ("Here:\n```python\nx = 1\n", False),
        ("Here:\n```python", False),
        ("Here:\n  ```\nx = 1\n``", False),
        ("Here:\n```python\nx = 1\n```py\n", False),  # not a line that closes
        ("Here:\n```python\nx = 1\n```\n", True),
        ("Here:\n```python\nx = 1\n```\nor\n```\n", False),
    ],
)
def test_code_fences(before, deferred):
    assert is_deferred(before, "a", "b", ("code_fences",)) == deferred


@pytest.mark.parametrize(
    ("prompt", "before", "deferred"),
    [
        (
            "[INST] Mend it. [/INST]",
            "```python\nx =",
            False,
        ),  # no line ends there
        ("Here:\n```python\n", "x =", False),  # opened by the prompt
        ("Here:\n```python\n", "x = 1\n```\nThis", True),  # and closed
        ("Mend it:\n```\nx=1\n```\n", "Here", True),  # as a message's special token writes it
        ("Mend it:\n```\nx=1\n```\n", "Here:\n```\ny =", False),
    ],
)
def test_code_fences_of_prompts_and_at_the_output_s_start(prompt, before, deferred):
    assert is_deferred(before, "a", "b", ("code_fences",), prompt) == deferred


def test_a_pattern_may_span_prompt_and_output():
    assert not is_deferred(" 1", "2", "x", ("Answer: .*",), prompt="Answer:")
    assert is_deferred(" 1", "2", "x", ("Answer: .*",), prompt="Question:")


def test_a_part_of_a_character_is_kept_exact():
    """Its first byte was deferred, the rest of a digit matched: a deferred token in a number."""
    assert not is_deferred("costs ", "\ufffd", "x", ("numbers",))
    assert not is_deferred("costs ", "x", "\ufffd", ("numbers",))


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_start|>"])
def test_special_tokens_are_line_breaks(end):
    """A message's closing fence with a special token behind it closed nothing."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<think>")])
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    texts = Texts(tokenizer)
    ids = tokenizer.encode(f"a{end}b<think>c\u00e9", add_special_tokens=False)
    assert texts.decode_lines(ids) == "a\nb<think>c\u00e9"
    assert texts.decode(ids) == f"a{end}b<think>c\u00e9"


def test_a_fence_itself_is_kept_exact():
    assert not is_deferred("Here:\n", "```", "So", ("code_fences",))
    assert not is_deferred("Here:\n", "So", "```", ("code_fences",))


def test_an_empty_match_keeps_nothing():
    assert is_deferred("abc", "d", "e", ("x*",))


@pytest.mark.parametrize("name", ["numbers", "code_fences"])
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), data=st.data())
def test_no_deferred_token_is_in_a_match_of_the_whole_text(name, words, data):
    """Named patterns hold for all that is written later, not only for the text so far."""
    at = data.draw(st.integers(0, len(words) - 1))
    before, token, text = "".join(words[:at]), words[at], "".join(words)
    if is_deferred(before, token, "zzz", (name,)):
        (pattern,) = FlySettings(exact_pattern=(name,)).patterns
        spans = [found.span() for found in pattern.finditer(text)]
        assert not any(a < len(before + token) and len(before) < b for a, b in spans)


def test_the_first_places_are_of_the_output():
    rule = rule_with(exact_first_tokens=3)
    judged = JudgedDraft([1, 2, 3], [True, False, False], [True] * 3, [1, 5, 5, 5], start=1)
    assert rule.resolve(judged).accepted == 1
    later = JudgedDraft([1, 2, 3], [True, False, False], [True] * 3, [1, 5, 5, 5], start=2)
    assert rule.resolve(later).deferred == (1, 2)


@settings(max_examples=200, deadline=None)
@given(st.text("aé€😀 7", max_size=30), st.data())
def test_a_running_text_is_the_whole_text(text, data):
    """Characters of several tokens, tokens that are taken back, and whatever is final when."""
    tokenizer = tiny.byte_tokenizer()

    def decode(ids):
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    ids, running, final = tokenizer.encode(text), RunningText(decode), 0
    for _ in range(6):
        final = data.draw(st.integers(final, len(ids)))
        shown = data.draw(st.integers(final, len(ids)))
        other = data.draw(st.sampled_from([[], tokenizer.encode("€7")[:2]]))
        assert running.of(ids[:shown] + other, final) == decode(ids[:shown] + other)


def test_keys_are_checked():
    def built(**keys):
        return config.build({"target_model_path": "x", **keys}, "here").exact_pattern

    assert built(exact_pattern="numbers") == ("numbers",)
    assert built(exact_pattern="[numbers,code_fences]") == ("numbers", "code_fences")
    assert built(exact_pattern=r"[a-z]\d{1,3}") == (r"[a-z]\d{1,3}",)
    assert built(exact_pattern=[r"\d+%", "numbers"]) == (r"\d+%", "numbers")
    assert built(exact_pattern=7) == ("7",)
    for pattern in (",", "[,]", " ", "]"):  # were taken for empty lists
        assert built(exact_pattern=pattern) == (pattern,)
    assert built(exact_pattern="[]") == built(exact_pattern="") == ()
    with pytest.raises(FlyError, match=re.escape("a regular expression: missing ), unterm")):
        built(exact_pattern="(")
    for impossible in ("a{99999999999999}", "(" * 5000):
        with pytest.raises(FlyError, match="exact_pattern"):
            built(exact_pattern=impossible)
    with pytest.raises(FlyError, match=r"numbers, code_fences or .* write \(number\) if the word"):
        built(exact_pattern="number")
    with pytest.raises(FlyError, match=r"exact_pattern=True \(here\): input should be a list"):
        built(exact_pattern=True)
    with pytest.raises(FlyError, match="exact_first_tokens=-1"):
        built(exact_first_tokens=-1)
