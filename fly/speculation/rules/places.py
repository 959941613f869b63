"""Where in an output a rule decides as exact verification does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fly.settings import PlaceSettings, Settings
from fly.speculation.rules.judged import JudgedDraft
from fly.speculation.stop_strings import BROKEN, Decode


@dataclass(frozen=True)
class Places:
    """first: how many places at an output's start are exact. patterns: what they match is, too.
    relax_in: what the model thinks between its `think_tokens`, or what it does not; the other, and
    these tokens, are exact. think_ids: their ids, where each is a token; else texts are searched.
    """

    first: int = 0
    patterns: tuple[re.Pattern[str], ...] = ()
    relax_in: Literal["everywhere", "thinking", "answer"] = "everywhere"
    think_tokens: tuple[str, ...] = ("", "")
    think_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, settings: Settings, tokenizer: Any = None) -> Places:
        """Those of a rule's keys; a rule without such keys has none."""
        if not isinstance(settings, PlaceSettings):
            return cls()
        vocabulary: dict[str, int] = {}
        if settings.relax_in != "everywhere":
            vocabulary = getattr(tokenizer, "get_vocab", dict)()
        ids = [vocabulary[token] for token in settings.think_tokens if token in vocabulary]
        return cls(
            settings.exact_first_tokens,
            settings.patterns,
            settings.relax_in,
            settings.think_tokens,
            tuple(ids) if len(ids) == 2 else (),
        )

    @property
    def are_all_relaxed(self) -> bool:
        return not (self.first or self.patterns or self.relax_in != "everywhere")

    def thought_in(
        self, tokens: Sequence[int], decode: Decode
    ) -> Literal["none", "open", "closed"]:
        """Whether prompt and output together open a thought, and whether they close it."""
        if self.think_ids:
            opening = self.think_ids[0]
            has_one, is_open = opening in tokens, self._last_of(tokens) == opening
        else:
            text = decode(tokens)
            has_one, is_open = self.think_tokens[0] in text, self._is_open(text)
        return "open" if is_open else "closed" if has_one else "none"

    def are_exact(self, judged: JudgedDraft, position: int) -> bool:
        """Whether the rule must decide as exact verification at this position of the draft."""
        if judged.start + position < self.first:
            return True
        if self.relax_in != "everywhere" and not self._stays_relaxed(judged, position):
            return True
        return bool(self.patterns) and self._is_in_match(judged, position)

    def _stays_relaxed(self, judged: JudgedDraft, position: int) -> bool:
        """Whether this place is where the rule may relax, and stays so whatever may be written
        here: no think token that ends it, and none's first characters."""
        before, is_thinking = judged.draft[:position], self.relax_in == "thinking"
        tails = [before, *([*before, token] for token in judged.choices(position))]
        if self.think_ids:
            known = judged.last_of(self.think_ids)
            found = (known if (last := self._last_of(tail)) is None else last for tail in tails)
            return all((last == self.think_ids[0]) == is_thinking for last in found)
        texts, ending = [judged.whole_text(tail) for tail in tails], self.think_tokens[is_thinking]
        begins = (*(ending[:count] for count in range(1, len(ending))), BROKEN)
        return all(self._is_open(text) == is_thinking for text in texts) and not any(
            text.endswith(begins) for text in texts[1:]
        )

    def _last_of(self, tokens: Sequence[int]) -> int | None:
        """The last of them that is a think token."""
        return next((token for token in reversed(tokens) if token in self.think_ids), None)

    def _is_open(self, text: str) -> bool:
        opening, closing = self.think_tokens
        return text.rfind(opening) > text.rfind(closing)

    def _is_in_match(self, judged: JudgedDraft, position: int) -> bool:
        """Whether a token that may be written here would be in a match of a pattern."""
        chain = judged.draft[:position]
        prompt, output = judged.texts(chain)
        start = len(output.rstrip(BROKEN))  # the token may complete a character
        outputs = [judged.texts([*chain, token])[1] for token in judged.choices(position)]
        if any(text.endswith(BROKEN) for text in outputs):
            return True  # nobody knows yet of which character it is a part
        # an output may begin a line, though nothing says so: "[/INST]```python"
        befores = {prompt, f"{prompt}\n" if prompt and not prompt.endswith("\n") else prompt}
        return any(
            match.end() > len(before) + start and match[0]
            for before in befores
            for text in outputs
            for pattern in self.patterns
            for match in pattern.finditer(before + text)
        )
