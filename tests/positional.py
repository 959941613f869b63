"""A scripted pair whose tokens depend on the position alone, and runners that speak it.

What follows a deferral is then the same as what follows the target's own token, so a recording's
one approximation (behind a branch the text goes on at the same offset) is exact.
"""

from dataclasses import dataclass

from tests.integration.test_oracle import ScriptedTarget
from tests.oracle import Script


@dataclass(frozen=True)
class Positional(Script):
    """Script by position. is_draft: `target_token` is what the draft would say there."""

    is_draft: bool = False

    def _hash(self, what, prefix):
        return super()._hash(what, [len(prefix) % 200, len(prefix) // 200])

    def target_token(self, prefix):
        own = super().target_token(prefix)
        if not self.is_draft or self._chance("agree", prefix) < self.agree:
            return own
        return self._token("other", prefix)


class ScriptedModel(ScriptedTarget):
    """Both sides of fly.execution.model_runner.ModelRunner that a drafter and a recorder use."""

    intersection = None

    def catch_up(self, slot, tokens, chunk=None):
        self.prefill(slot, tokens)

    def chain(self, feeds, steps):
        return None

    def relative_cost(self, tokens):
        return 0.6 if tokens <= 4 else 1 + tokens / 24
