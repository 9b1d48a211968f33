"""Whether K/V has tiers besides the device, and who has none: needs none of what copies blocks."""

from __future__ import annotations

from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig


def tiered(settings: Settings) -> bool:
    """Whether blocks leave the device, for host memory, a disk or another engine."""
    return bool(settings.cache.kv_offloading_size) or settings.disaggregation.disaggregation_mode != "none"


def option_of(settings: Settings) -> str:
    """The name of the option by which blocks leave the device."""
    return "kv_offloading_size" if settings.cache.kv_offloading_size else "disaggregation_mode"


def refuse_tiers(settings: Settings, what: str) -> None:
    """Raise InvalidConfig where K/V tiers are set for something that has none. what: its name."""
    option = option_of(settings)
    if settings.get(option) != OPTIONS[option].default:
        raise InvalidConfig(
            f"{OPTIONS[option].flag}: {what} has no K/V tiers, `quire serve` and LLM have: leave it out", param=option
        )


def refuse_prefill(settings: Settings, what: str) -> None:
    """Raise InvalidConfig for a prefill engine that none would run between its own requests. what: its name."""
    if settings.disaggregation.disaggregation_mode == "prefill":
        raise InvalidConfig(
            f"--disaggregation-mode prefill: {what} runs only while it is called; start `quire serve` for it",
            param="disaggregation_mode",
        )
