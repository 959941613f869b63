"""What fly reads of a head's config.json, as types. Other keys are ignored.

Producers put the same keys into different places, so every place has the same shape. Any value may
be null. Sizes are bounded, because modules are built of them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from fly import reading

_STRICT = ConfigDict(strict=True)
_Size = Annotated[int, Field(ge=1, le=1 << 20)] | None
_Id = Annotated[int, Field(ge=0, le=1 << 24)] | None
_Positions = Annotated[int, Field(ge=1, le=1 << 31)] | None
_Few = Annotated[int, Field(ge=1, le=1024)] | None
# -1: the embeddings, where layers are numbered by their outputs
_LayerIds = list[Annotated[int, Field(ge=-1, le=1024)]] | None
_Number = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
_Flag = bool | None
_Text = str | None


@with_config(_STRICT)
class _Rope(TypedDict, total=False):
    rope_type: _Text
    type: _Text
    rope_theta: _Number
    partial_rotary_factor: _Number
    factor: _Number
    low_freq_factor: _Number
    high_freq_factor: _Number
    attention_factor: _Number
    beta_fast: _Number
    beta_slow: _Number
    original_max_position_embeddings: _Positions


@with_config(_STRICT)
class _Keys(TypedDict, total=False):
    architectures: list[str] | None
    model_type: _Text
    speculators_model_type: _Text
    # the layers
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Few
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size
    hidden_act: _Text
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] | None
    max_position_embeddings: _Positions
    vocab_size: _Id
    attention_bias: _Flag
    layer_types: list[str] | None
    sliding_window: int | None
    use_sliding_window: _Flag
    rope_theta: _Number
    rope_scaling: _Rope | None
    rope_parameters: _Rope | None
    partial_rotary_factor: _Number
    # the target
    target_hidden_size: _Size
    num_target_layers: _Few
    aux_hidden_state_layer_ids: _LayerIds
    eagle_aux_hidden_state_layer_ids: _LayerIds
    target_layer_ids: _LayerIds
    use_aux_hidden_state: _Flag
    # EAGLE-3
    norm_before_residual: _Flag
    norm_before_fc: _Flag
    fc_norm: _Flag
    norm_output: _Flag
    # DFlash and DSpark
    block_size: _Few
    mask_token_id: _Id
    sample_from_anchor: _Flag
    markov_rank: Annotated[int, Field(ge=0, le=1 << 20)] | None
    markov_head_type: _Text
    enable_confidence_head: _Flag
    confidence_head_with_markov: _Flag


@with_config(_STRICT)
class _Config(_Keys, total=False):
    transformer_layer_config: _Keys | None
    dflash_config: _Keys | None
    eagle_config: _Keys | None


_CONFIG: TypeAdapter[Any] = TypeAdapter(_Config)


def check(config: Any) -> None:
    """Raise FlyError, naming the key, for what is no head's config.json."""
    reading.check_shape(config, _CONFIG, "config.json")
