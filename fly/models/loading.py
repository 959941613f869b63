"""Loading a checkpoint whose tensors are all there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fly.errors import FlyError, reason_of, summarize_names


@contextmanager
def naming_model(field: str, name: str) -> Iterator[None]:
    """What fails meanwhile is a model's: its files, its code, or memory. Raises FlyError."""
    try:
        yield
    except FlyError:
        raise
    except Exception as error:  # tokenizers has no other, and a model's code may raise any
        reason = reason_of(error)
        if name.endswith(".gguf"):
            reason += ": it may be cut short: fetch it again"
        if "unexpected keyword argument" in reason:  # of from_pretrained
            reason += ": if model_args give it, `fly config schema` lists fly's keys"
        if isinstance(error, OSError) and not Path(name).exists():
            reason += f" (a hub's model is meant, as {Path.cwd()} has no such folder)"
        raise FlyError(f"{field}={name}: cannot be loaded: {reason}") from error


class WithAllTensors:
    """A transformers auto class whose `from_pretrained` refuses a checkpoint that lacks tensors.

    transformers only warns, and fills them with random numbers. Tied weights are stored once.
    """

    def __init__(self, auto_class: Any, field: str) -> None:
        self._auto_class = auto_class
        self._field = field

    def from_pretrained(self, path: str, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """As the auto class's own."""
        model, info = self._auto_class.from_pretrained(
            path, *args, output_loading_info=True, **kwargs
        )
        tensors = model.state_dict(keep_vars=True)
        missing = set(info["missing_keys"])
        loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
        absent = sorted(n for n in missing if n not in tensors or id(tensors[n]) not in loaded)
        if absent:
            raise FlyError(
                f"{self._field}={path}: the checkpoint lacks {summarize_names(absent)}: fetch the "
                "model again, or name another one"
            )
        return model
