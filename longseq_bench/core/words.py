"""Properties of a workload in words for people."""

from longseq_bench.core.masks import FULL, parse_mask


def mode_words(mode: str, new_tokens: int) -> str:
    """Return a mode in words for people: "forward", "decode, 1 new token"."""
    return f"{mode}, {new_tokens} new token{'s' * (new_tokens > 1)}" if new_tokens else mode


def mask_words(text: str) -> str:
    """Return a mask in words for people: "not causal", "causal", "sliding window 4k"."""
    mask = parse_mask(text)
    return "not causal" if mask.kind == FULL else mask.label
