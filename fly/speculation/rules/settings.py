"""The keys of the rules that others have published, named as their publishers do. Imports no torch,
so that configurations are read without it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fly.settings import PlaceSettings


class CascadeSettings(PlaceSettings):
    cascade_alpha: float = Field(0.3, ge=0, le=1)
    """verification=cascade: a token of at least (1 - alpha) of the largest probability stands."""


class EnsembleSettings(PlaceSettings):
    assistant_ensemble_weight: float = Field(0.8, gt=0, le=1)
    """verification=ensemble: w, the target's weight in w p + (1 - w) q. 1 is exact."""


class MarsSettings(PlaceSettings):
    mars_theta: float = Field(0.9, ge=0, le=1)
    """verification=mars: the second choice stands where its logit is more than this share of the
    first's."""


class AsdSettings(PlaceSettings):
    # B, g and m of the authors' frozen configuration (Kissmetothemoon/ASD, dspark_stable.json)
    asd_budget: float = Field(8.0, ge=0)
    """verification=asd: B, the regret (logits) that a request may spend. 0: exact."""
    asd_gap: float | None = Field(0.25, ge=0)
    """verification=asd: g, the most regret per token from the mismatch to the draft's end. null:
    any."""
    asd_max_mismatches: int = Field(2, ge=0)
    """verification=asd: m, the most mismatches of a draft. 0 is exact."""


class CactusSettings(PlaceSettings):
    cactus_delta: float = Field(0.1, ge=0, le=1e6)
    """verification=cactus: how far a token's probability is raised. 0 is exact."""


class FsdSettings(PlaceSettings):
    fsd_div_threshold: float = Field(0.1, ge=0)
    """verification=fsd: any draft token stands where p and q differ by no more."""
    fsd_div_type: Literal["kl_div", "kl_div_reversed", "js_div", "tv_div"] = "js_div"
    """verification=fsd: the difference. kl_div: sum q ln(q/p), kl_div_reversed: sum p ln(p/q),
    js_div: Jensen-Shannon, tv_div: total variation."""


class EntropyRatioSettings(PlaceSettings):
    posterior_threshold: float = Field(0.95, gt=0, le=1)
    """verification=entropy_ratio: the most that p/q is compared with."""
    posterior_alpha: float = Field(0.4, ge=0)
    """verification=entropy_ratio: p/q is compared with exp(-this * entropy)."""


class SglangSettings(PlaceSettings):
    speculative_accept_threshold_single: float = Field(1.0, ge=0, le=1)
    """verification=sglang: a token of at least this probability stands."""
    speculative_accept_threshold_acc: float = Field(1.0, ge=0, le=1)
    """verification=sglang: another stands with its probability divided by this."""
