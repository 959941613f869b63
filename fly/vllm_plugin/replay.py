"""A request that vLLM has decoded, round by round as fly's own engine commits it: so its counts,
positions and traces are made by the same code. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from fly.errors import FlyError
from fly.runs.records import Observer
from fly.speculation.rules.judged import Resolution
from fly.speculation.sequence import Sequence, Verdict
from fly.vllm_plugin.verifier import verdict_of


def replay(
    sequence: Sequence,
    output: list[int],
    rounds: list[list[Any]],
    drafted_by: str,
    observer: Observer,
) -> None:
    """Commit the rounds of `Verifier.take_rounds` up to the end of the output.

    output: vLLM's tokens, the first of which is the prefill's; a pass without a draft is in no
    round and gave one token. drafted_by: a letter of fly.runs.records.SOURCES. Raises FlyError if
    the rounds do not give the output.
    """
    sequence.begin_with(output[0])
    noted = {line[0]: verdict_of(line, drafted_by) for line in rounds}
    while sequence.is_open and (start := len(sequence.generated)) < len(output):
        bare = Verdict([], [], [output[start]], Resolution(0), "")
        verdict = noted.get(start, bare)
        counts = sequence.commit(verdict)
        observer(sequence.round_record(verdict, counts, start))
    if sequence.is_open or sequence.generated != output[: len(sequence.generated)]:
        raise FlyError(
            f"--model vllm: the {len(rounds)} rounds of fly's plugin do not give the output of "
            f"{len(output)} tokens: set vllm_verification=vllm, and report this"
        )
