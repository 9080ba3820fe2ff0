"""What another thread may ask a communicator at any moment."""

import pytest
import tensorflow as tf

from tfdist.collectives import RING, Communicator
from tfdist.mesh import DeviceMesh

pytestmark = pytest.mark.timeout(60)


def test_what_runs_can_be_asked_while_its_marks_are_made(monkeypatch):
    """The failure watch looked between the two, and ended the job with a KeyError."""
    mesh = DeviceMesh([f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(2)])
    communicator = Communicator(mesh, RING, [1])
    plan, made = communicator.new_plan(), communicator._made
    looks = []

    def make_and_look(*arguments, **settings):
        variable = made(*arguments, **settings)
        with tf.init_scope():
            looks.append(communicator.running())
        return variable

    monkeypatch.setattr(communicator, "_made", make_and_look)

    @tf.function(autograph=False)
    def step():
        communicator.mark_running(1, plan)

    step()
    assert looks and not any(looks[:2])
    assert communicator.running() == {1: (1, plan)}
