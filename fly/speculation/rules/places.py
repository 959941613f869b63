"""Where in an output a rule decides as exact verification does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fly.settings import PlaceSettings, Settings
from fly.speculation.rules.judged import JudgedDraft
from fly.speculation.stop_strings import BROKEN


@dataclass(frozen=True)
class Places:
    """first: how many places at an output's start are exact. patterns: what they match is, too."""

    first: int = 0
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> Places:
        """Those of a rule's keys; a rule without such keys has none."""
        if not isinstance(settings, PlaceSettings):
            return cls()
        return cls(settings.exact_first_tokens, settings.patterns)

    @property
    def are_all_relaxed(self) -> bool:
        return not (self.first or self.patterns)

    def are_exact(self, judged: JudgedDraft, position: int) -> bool:
        """Whether the rule must decide as exact verification at this position of the draft."""
        if judged.start + position < self.first:
            return True
        return bool(self.patterns) and self._is_in_match(judged, position)

    def _is_in_match(self, judged: JudgedDraft, position: int) -> bool:
        """Whether the draft's or the target's token would be in a match of a pattern."""
        chain = judged.draft[:position]
        prompt, output = judged.texts(chain)
        start = len(output.rstrip(BROKEN))  # the token may complete a character
        outputs = [
            judged.texts([*chain, tokens[position]])[1]
            for tokens in (judged.draft, judged.target_tokens)
        ]
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
