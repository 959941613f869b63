"""fly: lm-eval with exact and loosely verified speculative decoding, and a proof of the scores.

`import fly` makes lm-eval's Python API know fly's models (`fly`, `fly_vllm`, `server`; `hf` and
`vllm` with config_path) and tasks. docs/notebook.ipynb shows both.
"""

from fly.api import Page, compare, report
from fly.errors import FlyError
from fly.harness import registration
from fly.version import VERSION

__all__ = ["FlyError", "Page", "__version__", "compare", "report"]

__version__ = VERSION
registration.register()
