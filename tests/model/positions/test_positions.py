"""Position methods against their definitions, in small numbers."""

import hashlib
import math
from pathlib import Path

import pytest
import torch

from trainshort.config.position_config import methods
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions import build_position, positions
from trainshort.model.positions.t5 import bucket_ids
from trainshort.model.transformer import TransformerLM


def make(name, width=16, heads=2, **settings):
    return build_position(ModelConfig(width=width, heads=heads, position=name, position_settings=settings))


def where(*rows):
    return torch.tensor(rows)


def test_all_six_are_there():
    assert positions.names()[:6] == ["alibi", "t5", "none", "sinusoidal", "learned", "rotary"]


def test_sinusoidal_is_fairseqs():
    """sin half, then cos half, frequencies 10000^(−i/(half−1)), the first token at position 2."""
    added = make("sinusoidal").embed(torch.zeros(1, 3, 16), where([0, 1, 5000]))[0]
    for row, position in zip(added.tolist(), (2, 3, 5002), strict=True):
        expected = [math.sin(position * 10_000 ** (-i / 7)) for i in range(8)]
        expected += [math.cos(position * 10_000 ** (-i / 7)) for i in range(8)]
        assert row == pytest.approx(expected, abs=4e-4)


def test_sinusoidal_handles_an_odd_width():
    method = make("sinusoidal", width=5, heads=1)
    assert method.embed(torch.zeros(1, 2, 5), where([0, 1]))[0, :, -1].tolist() == [0, 0]


def test_rotary_turns_interleaved_pairs():
    method = make("rotary", width=4, heads=1)
    q = torch.tensor([1.0, 0, 1, 0]).view(1, 1, 1, 4)
    turned, _ = method.rotate(q, q, where([3]))
    slow = 3 / 10_000**0.5
    assert turned.flatten().tolist() == pytest.approx([math.cos(3), math.sin(3), math.cos(slow), math.sin(slow)])


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    method = make("rotary")

    def score(i, j):
        turned_q, _ = method.rotate(q, q, where([i]))
        _, turned_k = method.rotate(k, k, where([j]))
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=0, atol=1e-5)
    assert (score(7, 3) - score(7, 4)).abs().max() > 1e-3


def test_rotary_angles_are_exact_far_away():
    """Compared with angles in float64."""
    method, base, dim = make("rotary", width=128, heads=2), 10_000.0, 64
    q = torch.randn(2, 2, 4, dim, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([0, 16_384, 100_003, 1_000_000])
    angle = places.double()[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)
    even, odd = q[..., 0::2].double(), q[..., 1::2].double()
    expected = torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], dim=-1)
    for given in (places.expand(2, 4), places.repeat(2, 1)):
        turned, _ = method.rotate(q, q, given)
        torch.testing.assert_close(turned.double(), expected.flatten(-2), atol=1e-6, rtol=0)


def test_rotary_angles_are_float32_in_a_bfloat16_model():
    method = make("rotary").to(torch.bfloat16)
    q = torch.ones(1, 2, 2, 8, dtype=torch.bfloat16)
    turned, _ = method.rotate(q, q, where([16_000, 16_001]))
    assert (turned[:, :, 0] != turned[:, :, 1]).any()


def test_xpos_scores_are_the_formula():
    """q·k of each pair, turned by the distance and multiplied by ζ^(distance/512), in float64."""
    dim, method = 8, make("xpos")
    q, k = torch.randn(2, 1, 2, 1, dim, dtype=torch.float64)
    i, j = 1700, 1100
    turned_q, _ = method.rotate(q, q, where([i]))
    _, turned_k = method.rotate(k, k, where([j]))
    a, b = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
    pair = torch.arange(dim // 2).double()
    zeta, angle = (2 * pair / dim + 0.4) / 1.4, (i - j) * 10_000 ** (-2 * pair / dim)
    expected = ((a * b.conj() * torch.exp(1j * angle)).real * zeta ** ((i - j) / 512)).sum(-1)
    torch.testing.assert_close((turned_q * turned_k).sum(-1), expected, rtol=1e-12, atol=1e-12)


def test_xpos_scores_are_those_of_x_transformers():
    theirs = pytest.importorskip("x_transformers.x_transformers")
    dim, length = 16, 600
    q, k = torch.randn(2, 1, 2, length, dim)
    freqs, scale = theirs.RotaryEmbedding(dim, use_xpos=True).forward_from_seq_len(length)
    expected = theirs.apply_rotary_pos_emb(q, freqs, scale) @ theirs.apply_rotary_pos_emb(k, freqs, scale**-1).mT
    turned_q, turned_k = make("xpos", width=32).rotate(q, k, torch.arange(length)[None])
    torch.testing.assert_close((turned_q @ turned_k.mT).tril(), expected.tril(), rtol=0, atol=3e-4)


def test_xpos_ends_where_float32_does():
    method = make("xpos", width=128)
    q = torch.randn(1, 2, 1, 64)
    turned_q, turned_k = method.rotate(q, q, where([method.max_length - 1]))
    torch.testing.assert_close((turned_q * turned_k).sum(-1), q.square().sum(-1))
    method.check_length(method.max_length)
    with pytest.raises(InputError, match=r"xpos leaves the range of float32 past 32,768 positions, but this input rea"):
        method.check_length(32_769)


def test_t5_buckets_in_small_integers():
    distance = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 20, 32, 99])
    assert bucket_ids(distance, 8, 32).tolist() == [0, 1, 2, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7, 7]


def test_t5_buckets_are_hugging_faces():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(300)
    theirs = t5.T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(bucket_ids(distance, 32, 128), theirs)


def test_t5_bias_past_its_maximum_is_the_last_bucket():
    method = make("t5")
    table = method.score_bias(9).table
    assert torch.equal(table[:, 0], method.table[:, 0])
    assert torch.equal(table[:, -1], method.table[:, -1])
    assert bucket_ids(torch.tensor([128, 10_000]), 32, 128).tolist() == [31, 31]


def test_learned_stops_at_its_table_and_says_so():
    method = make("learned", max_length=512)
    method.check_length(512)
    with pytest.raises(
        InputError,
        match=r"learned positions stop at 512, but this input reaches 600\. "
        r"Train with a longer table, or use position='alibi'\.",
    ):
        method.check_length(600)


@pytest.mark.parametrize("learned", [False, True])
def test_alibi_slopes_stay_float32(learned):
    method = make("alibi", learned_slopes=learned)
    before = method.slopes.clone()
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()):
        method = cast(method)
        assert method.slopes.dtype == torch.float32
        assert torch.equal(method.slopes, before)
    assert isinstance(method.slopes, torch.nn.Parameter) == learned


def test_alibi_built_on_meta_wakes_with_its_slopes():
    with torch.device("meta"):
        method = make("alibi")
    assert method.slopes.is_meta
    assert torch.equal(method.to_empty(device="cpu").slopes, torch.tensor([1 / 16, 1 / 256]))


def test_alibi_has_nothing_to_save():
    assert not make("alibi").state_dict()


@pytest.mark.parametrize("name", ["alibi", "t5", "none", "sinusoidal", "rotary"])
def test_all_but_learned_run_at_any_length(name):
    assert make(name).max_length is None
    make(name).check_length(10**9)


INITIAL_WEIGHTS = {
    "alibi": ({"max_bias": 6.0, "learned_slopes": True}, "bfcea4e0c896945e"),
    "t5": ({"buckets": 8, "max_distance": 20}, "50b5776cb8b7a13d"),
    "none": ({}, "d9568308c572de50"),
    "sinusoidal": ({}, "d9568308c572de50"),
    "learned": ({"max_length": 30}, "e05f662eba35bd17"),
    "rotary": ({"base": 500.0}, "d9568308c572de50"),
}
"""For each position method, its settings and the digest of the initial weights for the model and seed below."""


@pytest.mark.parametrize("position", INITIAL_WEIGHTS)
def test_initial_weights_are_bit_identical(position):
    settings, expected = INITIAL_WEIGHTS[position]
    shape = {"vocab_size": 40, "layers": 2, "width": 16, "heads": 4}
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig.parse({**shape, "position": position, "position_settings": settings}))
    weights = model.state_dict()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    assert digest.hexdigest()[:16] == expected


def test_what_is_known_without_torch_agrees_with_the_methods():
    assert methods.names() == positions.names()
    assert all(methods.get(name).config_class is method.Config for name, method in positions.items())


def test_abilities():
    made = {name: make(name) for name in positions.names()[:6]}
    assert [name for name, method in made.items() if method.linear_slopes() is not None] == ["alibi"]
    assert [name for name, method in made.items() if method.rotates()] == ["rotary"]
    assert [name for name, method in made.items() if method.max_length] == ["learned"]
    assert not any(method.is_content_dependent() for method in made.values())


def test_every_method_is_on_the_page_of_methods():
    page = (Path(__file__).parents[3] / "docs" / "positions.md").read_text(encoding="utf-8").lower()
    own = [name for name in positions.names() if positions.get(name).__module__.startswith("trainshort.")]
    assert [name for name in own if f"`{name}`" not in page and f"**{name}**" not in page] == []
