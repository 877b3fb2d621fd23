from __future__ import annotations

import os
import signal

import pytest

from fordstone.runtime.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_remembered_and_the_handler_before_comes_back(number: signal.Signals):
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.stop_requested is False
        os.kill(os.getpid(), number)
        assert signals.wait(10)
    assert signal.getsignal(number) is before


def test_who_listens_again_hears_although_somebody_put_another_handler_in_place():
    before = signal.getsignal(signal.SIGINT)

    def of_spark(*_: object) -> None:
        raise AssertionError("the epoch would not be finished")

    with Signals() as signals:
        signal.signal(signal.SIGINT, of_spark)
        signals.listen()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(10)
    assert signal.getsignal(signal.SIGINT) is before
