"""Settings: frozen, typed, and helpful about mistakes."""

import json
import math

import pytest
from pydantic import ValidationError

from trainshort.config.run_config import CONFIG_FORMAT, ModelConfig, RunConfig, TrainConfig, load_config, save_config
from trainshort.errors import InputError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"stepz": 3}}, r"Unknown setting 'train\.stepz'\. Did you mean 'train\.steps'\?"),
        ({"modle": {}}, r"Unknown setting 'modle'\. Did you mean 'model'\?"),
        ({"zzz": {}}, r"Unknown setting 'zzz'\.$"),
        (
            {"model": {"adaptive": {"cutofs": [1]}}},
            r"'model\.adaptive\.cutofs'\. Did you mean 'model\.adaptive\.cutoffs'",
        ),
        ({"train": {"steps": "many"}}, r"Setting 'train\.steps' cannot be 'many': input should be a valid integer"),
        ({"train": {"steps": 0}}, r"Setting 'train\.steps' cannot be 0: input should be greater than or equal to 1"),
        ({"train": {"batch": 6, "micro_batch": 4}}, "In 'train': micro_batch 4 must divide batch 6"),
        ({"optim": {"name": "adam"}}, r"Setting 'optim\.name' cannot be 'adam': input should be 'adamw', 'nesterov'"),
        ({"format": 99}, f"has format 99, and this version of trainshort reads format {CONFIG_FORMAT}"),
    ],
)
def test_mistakes_are_explained(values, message):
    with pytest.raises(InputError, match=message):
        RunConfig.parse(values)


@pytest.mark.parametrize(
    ("position", "name", "value"),
    [
        ("alibi", "max_bias", math.inf),
        ("alibi", "slopes", (math.nan, 1.0)),
        ("rotary", "base", math.inf),
        ("xpos", "scale_base", math.inf),
        ("fox", "max_decay_time", math.inf),
        ("fire", "threshold", math.inf),
    ],
)
def test_infinite_numbers_are_refused_before_anything_is_made_of_them(position, name, value):
    """xPos ended in a traceback, others in NaN after the first step."""
    with pytest.raises(InputError, match=rf"'model\.position_settings\.{name}.*should be a finite number"):
        ModelConfig.parse({"heads": 2, "position": position, "position_settings": {name: value}})
    with pytest.raises(InputError, match="Setting 'softmax_scale' cannot be inf: input should be a finite number"):
        ModelConfig.parse({"softmax_scale": math.inf})


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_replace_merges_sections_and_validates():
    config = RunConfig().replace(train={"steps": 7}, model={"position": "t5"})
    assert (config.train.steps, config.train.length, config.model.position) == (7, 128, "t5")
    with pytest.raises(InputError, match=r"Did you mean 'train\.steps'"):
        config.replace(train={"step": 7})


def test_a_config_survives_the_disk(tmp_path):
    config = RunConfig().replace(model={"adaptive": {"cutoffs": (5, 9)}, "kv_heads": 4}, optim={"betas": (0.8, 0.9)})
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"No config at .*config\.json\. Is this a run folder"),
        ("{", "is not readable JSON"),
        ("[]", "it holds a JSON list, and an object was expected"),
        (json.dumps({"format": 1, "moodel": 1}), "has format 1, and this version"),
    ],
)
def test_a_broken_config_file_is_explained(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "config.json")


def test_every_setting_is_documented():
    undocumented = [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for name, inner in field.annotation.model_fields.items()
        if not inner.description
    ]
    assert undocumented == []
