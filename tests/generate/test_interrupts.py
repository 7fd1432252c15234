"""Ctrl-C during generation: the first one waits for the end of the token, the second one stops at once."""

import os
import signal

import pytest
from test_streaming import make_model

import trainshort
from trainshort import InputError
from trainshort.cli.main import main
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.generate.session import Session
from trainshort.model.cache.ring_buffer import kernel_unavailable_reason


def interrupt_in_the_second_layer(made, times):
    """Send SIGINT from inside the second layer when a token is read. Return the name of the replaced method."""
    layer = made.caches[0].layer(1)
    method = (
        "decode_args" if kernel_unavailable_reason() is None else "attend"
    )  # compiled code calls `decode_args`, PyTorch `attend`
    original = getattr(layer, method)

    def interrupted(*arguments, **options):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    setattr(layer, method, interrupted)
    return method


def test_an_interrupt_waits_for_the_end_of_the_token():
    """A stream that was interrupted continues with the same tokens as one that was not."""
    model = make_model()
    expected = [token.id for token in trainshort.stream(model, [1, 2, 3], tokens=10)]
    made = trainshort.stream(model, [1, 2, 3], tokens=10)
    ids = [next(made).id for _ in range(3)]
    method = interrupt_in_the_second_layer(made, 1)
    with pytest.raises(KeyboardInterrupt):
        next(made)
    delattr(made.caches[0].layers[1], method)
    assert not made.torn
    assert ids + [token.id for token in made] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("tokens", [5, 1])
def test_a_token_that_was_not_returned_counts_after_feed(tokens):
    """An interrupt leaves one finished token in the stream. `feed` asks for `tokens` tokens, including that token."""
    made = trainshort.stream(make_model(), [1, 2], tokens=tokens)
    method = interrupt_in_the_second_layer(made, 1)
    while not made.waiting:
        with pytest.raises(KeyboardInterrupt):  # the first interrupt comes while the prompt is read
            next(made)
    delattr(made.caches[0].layers[1], method)
    assert len(made.waiting) == 1
    made.feed([7, 8])
    assert len(list(made)) == tokens


def test_a_second_interrupt_stops_at_once():
    made = trainshort.stream(make_model(), [1, 2, 3], tokens=10)
    next(made)
    interrupt_in_the_second_layer(made, 2)
    with pytest.raises(KeyboardInterrupt):
        next(made)
    assert made.torn
    with pytest.raises(InputError, match="interrupted in the middle of a token and cannot continue"):
        next(made)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_the_command_with_one_sentence(capsys, monkeypatch):
    made = trainshort.stream(make_model(), [1, 2, 3], tokens=10, tokenizer=ByteTokenizer())
    next(made)
    interrupt_in_the_second_layer(made, 2)
    monkeypatch.setattr("trainshort.cli.main.run", lambda argv: Session(made).run())
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "trainshort: stopped in the middle of a token." in capsys.readouterr().err
