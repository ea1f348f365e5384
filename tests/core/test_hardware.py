"""Hardware profiles: the built-in ones, a user's file, and errors that name the key."""

import re
from pathlib import Path

import pytest
import yaml

from longseq_bench.core.errors import UserError
from longseq_bench.core.hardware import Hardware, find_profile, profile, profiles, this_cpu

GOOD = {
    "name": "A card", "device": "cuda", "memory": "16GiB", "flops": {"float16": 1e14},
    "bandwidth": 1e12, "reaches": {"forward": 0.5, "train": 0.4}, "per_node": 4,
    "inside": {"latency": 1e-5, "bandwidth": 1e10},
    "between": {"latency": 2e-5, "bandwidth": 1e9}, "source": "invented",
}  # fmt: skip
RATE = {"kernel": "cudnn", "head_dim": 64, "mask": "full", "forward": 1e14, "source": "2026"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def write(file: Path, **changes: object) -> Path:
    entry = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    file.write_text(yaml.safe_dump({"card": entry}))
    return file


def test_built_in_profiles_are_complete_and_plausible() -> None:
    known = profiles()
    assert {"gtx1080", "a100", "h100", "h200", "b200"} <= set(known)
    for one in known.values():
        assert one.source
        assert 0 < one.efficiency["train"] <= one.efficiency["forward"] <= 1
        assert one.link(1) == one.link(one.per_node) == one.intra_node
        assert one.link(one.per_node + 1) == one.inter_node
        assert one.inter_node.bandwidth < one.intra_node.bandwidth < one.bandwidth
        for rate in one.kernels:
            assert re.search("20[0-9]{2}", rate.source), rate  # the year of the figure
            for flops in filter(None, (rate.forward, rate.backward)):
                assert 0.14 < flops / one.flops["bfloat16"] < 0.8, (one.name, rate)


def test_the_rate_is_a_share_of_the_peak_of_the_dtype() -> None:
    card = Hardware.model_validate(GOOD)
    assert (card.rate("float16", "forward"), card.rate("float16", "train")) == (5e13, 4e13)
    assert card.memory == 16 * 2**30


def test_a_figure_is_that_of_the_mask_and_of_the_nearest_head_dim() -> None:
    """The next lower one, else the next higher one."""
    causal = RATE | {"mask": "causal", "forward": 2e14, "backward": 5e14}
    # of two figures for the same the first one counts
    rows = [RATE, RATE | {"forward": 9e14}, causal, RATE | {"head_dim": 128, "forward": 3e14}]
    card = Hardware.model_validate(GOOD | {"kernels": rows})

    def forward(head_dim: int, causal: bool = False, train: bool = False) -> float:
        return card.figures(train, head_dim, causal)["cudnn"].forward / 1e14

    assert [forward(d) for d in (32, 64, 112, 128, 256)] == [1, 1, 1, 3, 3]
    assert [forward(d, causal=True) for d in (64, 96, 128)] == [2, 2, 3]
    # a training pass needs both figures, so that of the causal mask is the only one
    assert [forward(d, train=True) for d in (32, 64, 128)] == [2, 2, 2]


def test_a_gpu_has_the_profile_of_its_name_or_of_its_generation() -> None:
    known = {"NVIDIA H200": "H200 SXM", "NVIDIA GB200": "B200 SXM", "NVIDIA H800": "H100 SXM"}
    for name, found in (known | {"NVIDIA RTX A1000": None}).items():
        profile_here = find_profile(name, (9, 0) if name == "NVIDIA H800" else (7, 5))
        assert (profile_here and profile_here.name) == (found and f"NVIDIA {found}")


def test_memory_outside_tensors_grows_with_the_peers_on_the_node() -> None:
    h200 = profiles()["h200"]
    assert h200.outside_tensors(1, ()) == {"context": 600 * 2**20, "libraries": 2**25}
    assert h200.outside_tensors(8, (7,))["nccl"] == 7 * 448 * 2**20
    # ranks of other nodes use buffers of the network, which all share
    assert h200.outside_tensors(16, (15, 1))["nccl"] == (8 * 448 + 2 * 512) * 2**20
    assert this_cpu("a processor", 2, 2**30).outside_tensors(4, (3,)) == {}


def test_a_users_file_adds_and_replaces_profiles(file: Path) -> None:
    write(file)
    file.write_text(file.read_text() + file.read_text().replace("card:", "H200:"))
    assert profile("card", file).name == profile("h200", file).name == "A card"
    assert profile("H100", file) == profiles()["h100"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": None, "inside": None}, "card: memory: .*required"),
        ({"memry": 1}, "unknown key 'memry' in card of .*; did you mean 'memory'"),
        ({"flops": {"float12": 1}}, "card: flops.float12"),
        ({"reaches": {"forward": 0, "train": 0.5}}, "card: reaches.forward: .*greater than 0"),
        ({"kernels": [RATE | {"forward": 0}]}, r"card: kernels.0.forward: .*than 0"),
    ],
)
def test_a_mistake_in_a_profile_is_named_with_its_key(
    file: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        profile("card", write(file, **changes))
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a", "expected names with profiles"),
        (b"card: 3", "card: .*dictionary"),
        (yaml.safe_dump({"cpu": GOOD}).encode(), "cpu is this machine's processor"),
        (b"\xff\xfe", r"mine\.yaml is not UTF-8 text \(byte 0\)"),
    ],
)
def test_an_invalid_file_is_an_error(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        profiles(file)


def test_a_cpu_is_estimated_from_its_cores() -> None:
    one, two = (this_cpu("a processor", cores, 2**30) for cores in (1, 2))
    assert two.rate("float32", "forward") == 2 * one.rate("float32", "forward")
    assert "estimated" in one.source
