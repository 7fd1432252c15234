"""Tests of trainshort models in Hugging Face Transformers: all uses give the results of the trainshort model."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from random_runs import make_run

transformers = pytest.importorskip("transformers")

import trainshort.hf  # noqa: E402
from trainshort import InputError, TransformerLM  # noqa: E402
from trainshort.interop.export import export  # noqa: E402
from trainshort.model.positions import positions  # noqa: E402
from trainshort.train.checkpoint import load_model  # noqa: E402

MODEL_SETTINGS = {name: {"position": name} for name in positions.names()} | {
    "adaptive vocabulary": {"adaptive": {"cutoffs": (50, 120), "factor": 2}},
    "rotary with grouped-query attention": {"position": "rotary", "kv_heads": 2},
    "fox with grouped-query attention and NoPE heads": {"position": "fox", "kv_heads": 2, "nope_heads": 2},
    "learned slopes": {"position_settings": {"learned_slopes": True}},
    "learned": {"position": "learned", "position_settings": {"max_length": 80}},
}


class ModelPair(NamedTuple):
    """The same model in trainshort and in Transformers."""

    trainshort_model: TransformerLM
    hf_model: transformers.PreTrainedModel


@pytest.fixture(params=MODEL_SETTINGS.values(), ids=MODEL_SETTINGS)
def pair(request, tmp_path) -> ModelPair:
    run = make_run(tmp_path / "run", **request.param)
    export(run, "hf", tmp_path / "out")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    return ModelPair(load_model(run), hf_model)


@pytest.fixture
def exported_folder(tmp_path) -> Path:
    """Export a run with ALiBi. The run is in the folder `run` next to the returned folder."""
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    return tmp_path / "out"


@torch.no_grad()
def test_saved_and_loaded_model_is_bit_identical(pair, tmp_path):
    tokens = torch.randint(256, (2, 70))
    expected = pair.trainshort_model(tokens)
    assert torch.equal(pair.hf_model(tokens, use_cache=False).logits, expected)

    pair.hf_model.save_pretrained(tmp_path / "saved")
    loaded_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(loaded_model(tokens, use_cache=False).logits, expected)


@torch.no_grad()
def test_logits_to_keep(pair):
    tokens = torch.randint(256, (2, 70))
    last_logits = pair.hf_model(tokens, use_cache=False, logits_to_keep=3).logits
    torch.testing.assert_close(last_logits, pair.trainshort_model(tokens)[:, -3:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_loss_is_the_mean_over_targets(pair):
    tokens = torch.randint(256, (2, 70))
    loss = pair.hf_model(tokens, labels=tokens, use_cache=False).loss
    total, count = pair.trainshort_model.loss(tokens[:, :-1], tokens[:, 1:])
    assert count == 138
    torch.testing.assert_close(loss, total / 138, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_generate_with_padding(pair, cache_options):
    prompts = [torch.randint(1, 256, (length,)) for length in (40, 25)]
    padded_prompts = torch.zeros(2, 40, dtype=torch.long)
    attention_mask = torch.zeros(2, 40, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded_prompts[row, -len(prompt) :] = prompt
        attention_mask[row, -len(prompt) :] = 1
    options = {
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }

    generated = pair.hf_model.generate(padded_prompts, attention_mask=attention_mask, **options, **cache_options)
    for row, prompt in enumerate(prompts):
        stream = trainshort.stream(pair.trainshort_model, prompt, tokens=12, temperature=0, stop_at_end=False)
        assert generated[row, 40:].tolist() == [token.id for token in stream]


def test_beam_search_with_cache_equals_beam_search_without_cache(pair):
    prompt = torch.randint(1, 256, (1, 40))
    options = {
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "num_beams": 3,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    with_cache = pair.hf_model.generate(prompt, **options)
    without_cache = pair.hf_model.generate(prompt, use_cache=False, **options)
    assert torch.equal(with_cache, without_cache)


@torch.no_grad()
def test_reading_in_two_parts_equals_one_pass(pair):
    tokens = torch.randint(256, (1, 60))
    first = pair.hf_model(tokens[:, :35], use_cache=True)
    second = pair.hf_model(tokens[:, 35:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(logits, pair.trainshort_model(tokens), rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_documents_equal_separate_documents(pair):
    tokens = torch.randint(256, (1, 60))
    position_ids = torch.cat([torch.arange(25), torch.arange(35)])[None]
    expected_second = pair.trainshort_model(tokens[:, 25:])
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(tokens)}):
        packed = pair.hf_model(tokens, position_ids=position_ids, **options)
        torch.testing.assert_close(packed.logits[:, 25:], expected_second, rtol=0, atol=1e-5)
        assert packed.past_key_values is None
    with pytest.raises(InputError, match="Packed documents cannot be combined with a cache"):
        pair.hf_model(tokens, position_ids=position_ids, past_key_values=transformers.DynamicCache())


@pytest.mark.parametrize(("left_padding", "right_padding"), [(9, 0), (0, 9), (4, 5)])
@torch.no_grad()
def test_padding_does_not_change_logits(pair, left_padding, right_padding):
    tokens = torch.randint(256, (1, 40))
    padding = (left_padding, right_padding)
    padded_tokens = torch.nn.functional.pad(tokens, padding)
    attention_mask = torch.nn.functional.pad(torch.ones_like(tokens), padding)
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    expected = pair.trainshort_model(tokens)
    for options in ({}, {"use_cache": False}, {"position_ids": position_ids}):
        logits = pair.hf_model(padded_tokens, attention_mask=attention_mask, **options).logits
        logits_of_text = logits[:, left_padding : left_padding + 40]
        torch.testing.assert_close(logits_of_text, expected, rtol=0, atol=1e-5)


def test_gradients_in_evaluation_mode_equal_training_mode(pair):
    """In evaluation mode, the model creates a cache. The models have no dropout."""
    tokens = torch.randint(256, (2, 30))

    def compute_gradients() -> list[torch.Tensor]:
        pair.hf_model.zero_grad()
        pair.hf_model(tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in pair.hf_model.parameters()]

    pair.hf_model.train()
    training_gradients = compute_gradients()
    pair.hf_model.eval()
    torch.testing.assert_close(compute_gradients(), training_gradients)


def test_every_parameter_gets_a_gradient(pair):
    pair.hf_model.train()
    tokens = torch.randint(256, (2, 30))
    pair.hf_model(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in pair.hf_model.parameters())


def test_vocabulary_cannot_be_resized(pair):
    with pytest.raises(InputError, match="vocabulary of a trained model is fixed"):
        pair.hf_model.resize_token_embeddings(300)


def test_slopes_of_a_bfloat16_model_stay_in_float32(exported_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported_folder, dtype=torch.bfloat16)
    assert model.model.position.slopes.dtype == torch.float32
    assert model.model.position.slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


def test_folder_loads_with_trust_remote_code(exported_folder):
    """Without `import trainshort.hf`, Transformers loads the folder if the user trusts the code in the folder."""
    script = f"""
import transformers
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained({str(exported_folder)!r}, trust_remote_code=True)
print(type(model).__name__)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout.strip() == "TrainshortForCausalLM", process.stderr


def test_tokenizer_and_pipeline(exported_folder):
    text = "The state of the Union, naïve <|endoftext|>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported_folder)
    prompt = tokenizer(text)["input_ids"]
    assert tokenizer.decode(prompt) == text

    model = transformers.AutoModelForCausalLM.from_pretrained(exported_folder)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 9, "do_sample": False, "return_tensors": True, "pad_token_id": 0, "eos_token_id": None}
    generated = list(pipeline(text, **options)[0]["generated_token_ids"])

    trainshort_model = load_model(exported_folder.parent / "run")
    stream = trainshort.stream(trainshort_model, torch.tensor(prompt), tokens=9, temperature=0)
    assert generated[len(prompt) :] == [token.id for token in stream]


def test_trainer_reduces_the_loss_and_saves_the_model(exported_folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported_folder)
    dataset = [{"input_ids": row, "labels": row} for row in torch.randint(256, (1, 24)).repeat(16, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_steps=8,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]

    saved_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-8")
    assert torch.equal(saved_model.model.final_norm.weight, model.model.final_norm.weight)
