"""Masks: their texts, pairs and documents."""

import pytest

from longseq_bench.analysis.labels import mask_words
from longseq_bench.core.errors import UserError
from longseq_bench.core.masks import DISTRIBUTIONS, parse_mask
from longseq_bench.core.model import Workload

TEXTS = {
    "full": ("full", "not causal", 900),
    "causal": ("causal", "causal", 465),
    "sliding-window:4k": ("sliding-window:4096", "sliding window 4k", 465),
    "sliding-window:7": ("sliding-window:7", "sliding window 7", 465 - 23 * 24 // 2),
    "prefix:10": ("prefix:10", "prefix 10", 465 + 45),
    "prefix:1k": ("prefix:1024", "prefix 1k", 900),
    "documents:7": ("documents:7", "documents of 7", 4 * 28 + 3),
    "documents:10,5, 15": ("documents:10,5,15", "3 documents", 55 + 15 + 120),
    "full-documents:10,5,15": ("full-documents:10,5,15", "3 full documents", 100 + 25 + 225),
    "chunked:7": ("chunked:7", "chunked 7", 4 * 28 + 3),
    "documents:chatqa2@3": ("documents:chatqa2@3", "documents chatqa2@3", 465),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_words_and_pairs(text: str) -> None:
    mask = parse_mask(text)
    words = mask_words(text)
    assert (mask.text, words, mask.visible_pairs(30)) == TEXTS[text]
    assert parse_mask(mask.text) == mask


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slidng-window:3", "unknown mask 'slidng-window'; did you mean 'sliding-window'?"),
        ("sliding-window", "mask 'sliding-window' needs a number of tokens; write sliding-win"),
        ("sliding-window:0", "tokens '0' is not positive"),
        ("documents:wiki", "unknown distribution of a mask 'wiki'; known: chatqa2"),
        ("documents:4,", "mask 'documents:4,': tokens '' can't be read"),
        ("causal:3", "causal takes no number; write causal"),
    ],
)
def test_a_text_that_is_no_mask(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_mask(text)
    assert message in str(raised.value)


def test_documents_of_any_length() -> None:
    assert parse_mask("documents:7").document_lengths(30) == (7, 7, 7, 7, 2)
    three = parse_mask("documents:10,5,15")
    assert three.document_lengths(30) == (10, 5, 15)
    assert three.document_lengths(62) == (10, 5, 15, 10, 5, 15, 2)
    assert three.document_lengths(12) == (10, 2)
    three.check_tokens(30)
    with pytest.raises(UserError, match="3 documents of the mask add up to 30 tokens, but the"):
        three.check_tokens(31)


def test_a_distribution_is_drawn_from_its_bins_and_equal_for_equal_seeds() -> None:
    tokens = 400_000_000
    lengths = parse_mask("documents:chatqa2").document_lengths(tokens)
    # a record has the seed, not the lengths
    assert lengths[:3] == (53_311, 61_902, 220_553)
    assert sum(lengths) == tokens
    assert lengths == parse_mask("full-documents:chatqa2@0").document_lengths(tokens)
    bins = DISTRIBUTIONS["chatqa2"]
    total = sum(weight for *_, weight in bins)
    for first, last, weight in bins[:8]:
        share = sum(first <= n < last for n in lengths) / len(lengths)
        assert share == pytest.approx(weight / total, abs=0.02)


def test_a_plain_mask_is_the_same_workload_as_causal() -> None:
    """Also the same key, so that records of both belong together."""
    plain = Workload(seq_len=8, causal=True)
    assert Workload(seq_len=8, mask="causal") == plain
    assert Workload(seq_len=8, mask="full") == Workload(seq_len=8)
    window = Workload(seq_len=8, mask="sliding-window:4")
    assert (window.causal, window.mask) == (True, "sliding-window:4")
    assert Workload.model_validate(window.model_dump()) == window
    assert window.visibility.label == "sliding window 4"
    assert plain.visibility.text == "causal"
    with pytest.raises(ValueError, match="mask prefix:4 is not causal; leave out causal"):
        Workload(seq_len=8, causal=True, mask="prefix:4")


@pytest.mark.parametrize(("text", "pairs"), [("documents:2", 3), ("full-documents:1,3", 5)])
def test_a_trillion_documents_are_counted_without_a_list(text: str, pairs: int) -> None:
    mask = parse_mask(text)
    assert mask.visible_pairs(2**40) == pairs * 2**39
    assert mask.pairs_before(2**20, 2**40) == pairs * 2**19
