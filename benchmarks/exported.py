"""GGUF models for programs that load folders only."""

from fly.models import gguf
from fly.models.sources import ModelSource
from fly.paths import fly_home


def as_folder(source: ModelSource, with_weights: bool = True) -> str:
    """What transformers and vLLM load: of a GGUF file, its bfloat16 copy, which is made once."""
    if source.file is None:
        return source.path
    metadata = gguf.metadata_folder(source.file)
    folder = fly_home() / "exported" / metadata.name
    if with_weights and not folder.is_dir():
        gguf.export(source.file, folder)
    return str(folder if with_weights else metadata)
