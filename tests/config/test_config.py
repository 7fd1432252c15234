"""Tests of the configs: validation, error messages, and reading and writing `config.json`."""

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
        ({"optim": {"betas": (0.9, 1.0)}}, r"optim\.betas.*0\.9 and 1\.0"),
        ({"format": 99}, f"has format 99, and this version of trainshort reads format {CONFIG_FORMAT}"),
    ],
)
def test_invalid_setting_is_named_in_error_message(values, message):
    with pytest.raises(InputError, match=message):
        RunConfig.parse(values)


@pytest.mark.parametrize(
    ("position", "setting", "value"),
    [
        ("alibi", "max_bias", math.inf),
        ("alibi", "slopes", (math.nan, 1.0)),
        ("rotary", "base", math.inf),
        ("xpos", "scale_base", math.inf),
        ("fox", "max_decay_time", math.inf),
        ("fire", "threshold", math.inf),
    ],
)
def test_infinite_position_settings_are_rejected(position, setting, value):
    with pytest.raises(InputError, match=rf"'model\.position_settings\.{setting}.*should be a finite number"):
        ModelConfig.parse({"heads": 2, "position": position, "position_settings": {setting: value}})


def test_infinite_model_settings_are_rejected():
    with pytest.raises(InputError, match="Setting 'softmax_scale' cannot be inf: input should be a finite number"):
        ModelConfig.parse({"softmax_scale": math.inf})


def test_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_replace_merges_nested_configs_and_validates():
    config = RunConfig().replace(train={"steps": 7}, model={"position": "t5"})
    assert config.train.steps == 7
    assert config.train.length == 128  # the default value
    assert config.model.position == "t5"
    with pytest.raises(InputError, match=r"Did you mean 'train\.steps'"):
        config.replace(train={"step": 7})


def test_saved_config_equals_loaded_config(tmp_path):
    config = RunConfig().replace(model={"adaptive": {"cutoffs": (5, 9)}, "kv_heads": 4}, optim={"betas": (0.8, 0.9)})
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("file_content", "message"),
    [
        (None, r"No config at .*config\.json\. Is this a run folder"),
        ("{", r"config\.json.*invalid JSON"),
        ("[]", r"config\.json.*expected a JSON object, got a JSON list"),
        (json.dumps({"format": 1, "moodel": 1}), "has format 1, and this version"),
        (json.dumps({"model_type": "gpt2"}), "Hugging Face model"),
    ],
)
def test_invalid_config_file_is_explained(tmp_path, file_content, message):
    path = tmp_path / "config.json"
    if file_content is not None:
        path.write_text(file_content)
    with pytest.raises(InputError, match=message):
        load_config(path)


def test_every_setting_has_a_description():
    undocumented_settings = []
    for section, section_field in RunConfig.model_fields.items():
        nested_fields = getattr(section_field.annotation, "model_fields", {})
        for name, field in nested_fields.items():
            if not field.description:
                undocumented_settings.append(f"{section}.{name}")
    assert undocumented_settings == []
