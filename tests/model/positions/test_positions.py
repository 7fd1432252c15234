"""Tests of the position methods: their formulas, and properties that hold for all methods."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainshort.config.position_config import methods
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions import PositionMethod, build_position, positions
from trainshort.model.positions.t5 import bucket_ids
from trainshort.model.transformer import TransformerLM


def make_method(name: str, width: int = 16, heads: int = 2, **settings) -> PositionMethod:
    """Create a position method with the given settings of the method."""
    return build_position(ModelConfig(width=width, heads=heads, position=name, position_settings=settings))


def test_first_six_methods():
    assert positions.names()[:6] == ["alibi", "t5", "none", "sinusoidal", "learned", "rotary"]


# ---- sinusoidal and learned positions


def test_sinusoidal_equals_fairseq():
    """Sines, then cosines, with frequencies 10000^(-i/7) for i = 0, ..., 7. The first token has position 2."""
    vectors = make_method("sinusoidal").embed(torch.zeros(1, 3, 16), torch.tensor([[0, 1, 5000]]))[0]
    for vector, fairseq_position in zip(vectors.tolist(), (2, 3, 5002), strict=True):
        angles = [fairseq_position * 10_000 ** (-i / 7) for i in range(8)]
        expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        assert vector == pytest.approx(expected, abs=4e-4)


def test_sinusoidal_with_odd_width_ends_in_zero():
    method = make_method("sinusoidal", width=5, heads=1)
    assert method.embed(torch.zeros(1, 2, 5), torch.tensor([[0, 1]]))[0, :, -1].tolist() == [0, 0]


def test_learned_positions_reject_inputs_beyond_the_table():
    method = make_method("learned", max_length=512)
    method.check_length(512)
    with pytest.raises(InputError, match="learned positions stop at 512, but this input reaches 600"):
        method.check_length(600)


# ---- rotary and xPos


def test_rotary_rotates_interleaved_pairs():
    method = make_method("rotary", width=4, heads=1)
    q = torch.tensor([1.0, 0, 1, 0]).view(1, 1, 1, 4)
    rotated, _ = method.rotate(q, q, torch.tensor([[3]]))
    first_angle = 3
    second_angle = 3 / 10_000**0.5
    expected = [math.cos(first_angle), math.sin(first_angle), math.cos(second_angle), math.sin(second_angle)]
    assert rotated.flatten().tolist() == pytest.approx(expected)


def test_rotary_scores_depend_on_distance_only():
    q = torch.randn(1, 2, 1, 8)
    k = torch.randn(1, 2, 1, 8)
    method = make_method("rotary")

    def compute_score(query_position: int, key_position: int) -> Tensor:
        rotated_q, _ = method.rotate(q, q, torch.tensor([[query_position]]))
        _, rotated_k = method.rotate(k, k, torch.tensor([[key_position]]))
        return (rotated_q * rotated_k).sum(-1)

    torch.testing.assert_close(compute_score(7, 3), compute_score(107, 103), rtol=0, atol=1e-5)
    assert (compute_score(7, 3) - compute_score(7, 4)).abs().max() > 1e-3


def test_rotary_is_exact_at_large_positions():
    method = make_method("rotary", width=128, heads=2)
    base = 10_000.0
    dim = 64
    q = torch.randn(2, 2, 4, dim, generator=torch.Generator().manual_seed(0))
    row_of_positions = torch.tensor([0, 16_384, 100_003, 1_000_000])

    angles = row_of_positions.double()[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)
    even = q[..., 0::2].double()
    odd = q[..., 1::2].double()
    expected_pairs = [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()]
    expected = torch.stack(expected_pairs, dim=-1).flatten(-2)

    # The angles of an expanded tensor are computed for one row. The angles of a repeated tensor are computed for both.
    for position_ids in (row_of_positions.expand(2, 4), row_of_positions.repeat(2, 1)):
        rotated, _ = method.rotate(q, q, position_ids)
        torch.testing.assert_close(rotated.double(), expected, atol=1e-6, rtol=0)


def test_rotary_in_a_bfloat16_model_distinguishes_large_positions():
    method = make_method("rotary").to(torch.bfloat16)
    q = torch.ones(1, 2, 2, 8, dtype=torch.bfloat16)
    rotated, _ = method.rotate(q, q, torch.tensor([[16_000, 16_001]]))
    assert (rotated[:, :, 0] != rotated[:, :, 1]).any()


def test_xpos_scores_equal_formula():
    """Each pair of q * k is rotated by the distance and multiplied by zeta^(distance / 512)."""
    dim = 8
    method = make_method("xpos")
    q, k = torch.randn(2, 1, 2, 1, dim, dtype=torch.float64)
    query_position = 1700
    key_position = 1100
    rotated_q, _ = method.rotate(q, q, torch.tensor([[query_position]]))
    _, rotated_k = method.rotate(k, k, torch.tensor([[key_position]]))

    distance = query_position - key_position
    complex_q = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    complex_k = torch.view_as_complex(k.unflatten(-1, (-1, 2)))
    pairs = torch.arange(dim // 2).double()
    zeta = (2 * pairs / dim + 0.4) / 1.4
    angles = distance * 10_000 ** (-2 * pairs / dim)
    rotated_products = (complex_q * complex_k.conj() * torch.exp(1j * angles)).real
    expected = (rotated_products * zeta ** (distance / 512)).sum(-1)
    torch.testing.assert_close((rotated_q * rotated_k).sum(-1), expected, rtol=1e-12, atol=1e-12)


def test_xpos_scores_equal_x_transformers():
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    dim = 16
    length = 600
    q, k = torch.randn(2, 1, 2, length, dim)
    frequencies, scale = x_transformers.RotaryEmbedding(dim, use_xpos=True).forward_from_seq_len(length)
    expected_q = x_transformers.apply_rotary_pos_emb(q, frequencies, scale)
    expected_k = x_transformers.apply_rotary_pos_emb(k, frequencies, scale**-1)
    expected_scores = expected_q @ expected_k.mT

    rotated_q, rotated_k = make_method("xpos", width=32).rotate(q, k, torch.arange(length)[None])
    scores = rotated_q @ rotated_k.mT
    torch.testing.assert_close(scores.tril(), expected_scores.tril(), rtol=0, atol=3e-4)


def test_xpos_rejects_positions_that_leave_the_range_of_float32():
    method = make_method("xpos", width=128)
    assert method.max_length == 32_768
    q = torch.randn(1, 2, 1, 64)
    rotated_q, rotated_k = method.rotate(q, q, torch.tensor([[method.max_length - 1]]))
    torch.testing.assert_close((rotated_q * rotated_k).sum(-1), q.square().sum(-1))
    method.check_length(method.max_length)
    with pytest.raises(InputError, match=r"xpos.*32,768 positions, but this input reaches 32,769"):
        method.check_length(32_769)


# ---- T5


def test_t5_buckets_of_small_distances():
    distances = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 20, 32, 99])
    assert bucket_ids(distances, 8, 32).tolist() == [0, 1, 2, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7, 7]


def test_t5_buckets_equal_hugging_face():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(300)
    expected = t5.T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=32, max_distance=128
    )
    assert torch.equal(bucket_ids(distances, 32, 128), expected)


def test_t5_uses_the_last_bucket_beyond_the_maximum_distance():
    method = make_method("t5")
    table = method.score_bias(9).table
    assert torch.equal(table[:, 0], method.table[:, 0])
    assert torch.equal(table[:, -1], method.table[:, -1])
    assert bucket_ids(torch.tensor([128, 10_000]), 32, 128).tolist() == [31, 31]


# ---- ALiBi


@pytest.mark.parametrize("learned_slopes", [False, True])
def test_alibi_slopes_stay_in_float32(learned_slopes):
    method = make_method("alibi", learned_slopes=learned_slopes)
    slopes_before = method.slopes.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        method = method.to(dtype)
        assert method.slopes.dtype == torch.float32
        assert torch.equal(method.slopes, slopes_before)
    assert isinstance(method.slopes, torch.nn.Parameter) == learned_slopes


def test_alibi_slopes_are_set_when_a_meta_model_gets_memory():
    with torch.device("meta"):
        method = make_method("alibi")
    assert method.slopes.is_meta
    assert torch.equal(method.to_empty(device="cpu").slopes, torch.tensor([1 / 16, 1 / 256]))


def test_alibi_adds_nothing_to_checkpoints():
    assert not make_method("alibi").state_dict()


# ---- all methods


@pytest.mark.parametrize("name", ["alibi", "t5", "none", "sinusoidal", "rotary"])
def test_methods_without_maximum_length(name):
    method = make_method(name)
    assert method.max_length is None
    method.check_length(10**9)


# For each position method, its settings and a hash of the initial weights for the model and the seed in the test below.
INITIAL_WEIGHTS = {
    "alibi": ({"max_bias": 6.0, "learned_slopes": True}, "bfcea4e0c896945e"),
    "t5": ({"buckets": 8, "max_distance": 20}, "50b5776cb8b7a13d"),
    "none": ({}, "d9568308c572de50"),
    "sinusoidal": ({}, "d9568308c572de50"),
    "learned": ({"max_length": 30}, "e05f662eba35bd17"),
    "rotary": ({"base": 500.0}, "d9568308c572de50"),
}


@pytest.mark.parametrize("position", INITIAL_WEIGHTS)
def test_initial_weights_are_bit_identical(position):
    settings, expected_hash = INITIAL_WEIGHTS[position]
    shape = {"vocab_size": 40, "layers": 2, "width": 16, "heads": 4}
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig.parse({**shape, "position": position, "position_settings": settings}))
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    assert digest.hexdigest()[:16] == expected_hash


def test_descriptions_without_torch_match_the_methods():
    assert methods.names() == positions.names()
    for name, method in positions.items():
        assert methods.get(name).config_class is method.Config


def test_capabilities_of_the_first_six_methods():
    created = {name: make_method(name) for name in positions.names()[:6]}
    assert [name for name, method in created.items() if method.linear_slopes() is not None] == ["alibi"]
    assert [name for name, method in created.items() if method.rotates()] == ["rotary"]
    assert [name for name, method in created.items() if method.max_length] == ["learned"]
    assert not any(method.is_content_dependent() for method in created.values())


def test_every_method_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "positions.md").read_text(encoding="utf-8").lower()
    for name, method in positions.items():
        is_builtin = method.__module__.startswith("trainshort.")
        if is_builtin:
            assert f"`{name}`" in page or f"**{name}**" in page, name
