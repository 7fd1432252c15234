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


def interrupt_in_second_layer(monkeypatch, stream, times):
    """Send SIGINT `times` times whenever the second layer processes a token. `monkeypatch.undo` ends this."""
    layer = stream.caches[0].layer(1)
    # The compiled decoder calls `decode_args`, the model calls `attend`.
    method_name = "decode_args" if kernel_unavailable_reason() is None else "attend"
    original_method = getattr(layer, method_name)

    def interrupted_method(*args, **kwargs):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return original_method(*args, **kwargs)

    monkeypatch.setattr(layer, method_name, interrupted_method)


def test_interrupt_waits_for_the_end_of_the_token(monkeypatch):
    """An interrupted stream continues with the same tokens as a stream without an interrupt."""
    model = make_model()
    expected = [token.id for token in trainshort.stream(model, [1, 2, 3], tokens=10)]
    stream = trainshort.stream(model, [1, 2, 3], tokens=10)
    token_ids = [next(stream).id for _ in range(3)]
    interrupt_in_second_layer(monkeypatch, stream, times=1)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.undo()
    assert not stream.is_broken
    token_ids += [token.id for token in stream]
    assert token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("tokens", [5, 1])
def test_pending_token_counts_after_feed(monkeypatch, tokens):
    """An interrupt leaves a finished token in the stream. `feed` requests `tokens` tokens, including this token."""
    stream = trainshort.stream(make_model(), [1, 2], tokens=tokens)
    interrupt_in_second_layer(monkeypatch, stream, times=1)
    # The first interrupt comes while the prompt is processed, so the first call may leave no token.
    while not stream.pending_tokens:
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    monkeypatch.undo()
    assert len(stream.pending_tokens) == 1
    stream.feed([7, 8])
    assert len(list(stream)) == tokens


def test_second_interrupt_stops_at_once(monkeypatch):
    stream = trainshort.stream(make_model(), [1, 2, 3], tokens=10)
    next(stream)
    interrupt_in_second_layer(monkeypatch, stream, times=2)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.is_broken
    with pytest.raises(InputError, match="cannot continue"):
        next(stream)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_ends_the_command_with_one_line(capsys, monkeypatch):
    stream = trainshort.stream(make_model(), [1, 2, 3], tokens=10, tokenizer=ByteTokenizer())
    next(stream)
    interrupt_in_second_layer(monkeypatch, stream, times=2)
    monkeypatch.setattr("trainshort.cli.main.run", lambda argv: Session(stream).run())
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 2
    assert "trainshort: Stopped while a token was processed." in capsys.readouterr().err
