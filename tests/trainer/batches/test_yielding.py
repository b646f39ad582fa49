"""Training waits while requests are being answered, if it is asked to."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from tests.trainer.factories import sample
from tuneloop.shared.job_marks import TRAFFIC_S, touch_traffic
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.micro_batch import QUIET_S, MicroBatch

ROWS = [sample(number) for number in range(8)]


@contextmanager
def traffic(job_dir):
    """The mark as an explorer touches it; yields what ends it."""
    job_dir.mkdir(parents=True, exist_ok=True)
    over = Event()
    touch_traffic(job_dir)

    def go_on():
        while not over.wait(TRAFFIC_S):
            touch_traffic(job_dir)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()


def steps_of(settings, stop=None, **trainer):
    chosen = settings(trainer={"yield_to_traffic": True, **trainer})
    learner, micro_batch = snapshot.load(chosen, None), MicroBatch(chosen, stop)
    return chosen.job_dir, lambda: micro_batch.step(learner, ROWS, version=0), learner


def begun_in_traffic(job_dir, step, threads):
    """A step that has seen traffic since it was made ready, and so waits."""
    running = threads.submit(step)
    time.sleep(2 * QUIET_S)
    return running


def test_a_step_waits_for_traffic_to_end_and_learns_the_same(settings):
    job_dir, step, learner = steps_of(settings)
    before = learner.actor.network.state_dict()
    before = {name: each.clone() for name, each in before.items()}
    with ThreadPoolExecutor(1) as threads, traffic(job_dir) as over:
        running = begun_in_traffic(job_dir, step, threads)
        assert not running.done()
        assert all(bool((each == before[name]).all()) for name, each in learner.actor.network.state_dict().items())
        over.set()
        waited = running.result(60)
    quiet = snapshot.load(plain := settings(), None)
    alone = MicroBatch(plain).step(quiet, ROWS, version=0)
    assert waited["time/yielded"] >= QUIET_S
    assert "time/yielded" not in alone
    assert waited["actor/pg_loss"] == alone["actor/pg_loss"]


def test_a_stop_ends_the_waiting(settings):
    stop = Event()
    job_dir, step, _ = steps_of(settings, stop)
    with ThreadPoolExecutor(1) as threads, traffic(job_dir):
        running = begun_in_traffic(job_dir, step, threads)
        assert not running.done()
        stop.set()
        assert running.result(60)["time/yielded"] > 0
