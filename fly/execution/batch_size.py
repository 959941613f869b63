"""How many sequences fit into memory: `--batch_size auto`.

A sequence costs its K/V, exactly known per token, and its share of the widest pass's workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fly.execution import oom
from fly.execution.heads.base import Head
from fly.execution.model_runner import ModelRunner

USABLE = 0.85  # the rest is for fragmentation, other processes, and the scores' own work


@dataclass(frozen=True)
class SequenceWork:
    """What one sequence asks of a model.

    runner: has one slot, is used for the measurement and left empty. width: the widest pass per
    sequence, in tokens. kept: distributions over the vocabulary that sampling holds beside.
    """

    runner: ModelRunner
    width: int
    kept: int = 0

    def bytes_for(self, tokens: int) -> dict[torch.device, int]:
        """Bytes of a sequence: K/V of `tokens` tokens, the widest pass's workspace, distributions.

        The workspace is measured on accelerators. On CPUs, where it cannot be, it is the logits in
        the model's dtype and twice in float32, which is most of it.
        """
        runner = self.runner
        runner.prefill(0, [0])
        before = {}
        for device in runner.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                before[device] = torch.cuda.memory_allocated(device)
        logits = runner.extend([[0] * self.width]).to(torch.float32, copy=True)  # as in sampling
        needed = Counter({runner.device: self.kept * logits.shape[-1] * torch.float32.itemsize})
        if not before:
            needed[runner.device] += logits.numel() * (8 + runner.model.dtype.itemsize)
        for device, held in before.items():
            torch.cuda.synchronize(device)
            needed[device] += torch.cuda.max_memory_allocated(device) - held
        for device, per_token in runner.cache.bytes_per_token.items():
            needed[device] += per_token * runner.cache.rounded(tokens + self.width)
        runner.resize(runner.slots)
        return needed


def sequences_that_fit(works: Iterable[SequenceWork | Head], tokens: int, at_most: int) -> int:
    """Sequences of `tokens` tokens that fit beside the loaded models; 1 to `at_most`.

    Models on one device share its memory.
    """
    needed: Counter[torch.device] = Counter()
    for work in works:
        try:
            needed.update(work.bytes_for(tokens))
        except (RuntimeError, MemoryError) as error:
            if oom.is_out_of_memory(error):
                return 1
            raise
    fits = (int(USABLE * oom.free_bytes(device) / need) for device, need in needed.items() if need)
    return max(1, min(at_most, *fits))
