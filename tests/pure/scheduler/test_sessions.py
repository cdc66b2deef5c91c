"""Closing a session affects only the requests and blocks of this session. Session hints never change an answer."""

from __future__ import annotations

import os
import random

from kvtier.cache.config import HostConfig
from kvtier.index import Chain, Hints
from kvtier.scheduler import Request
from scheduler_support import Device, alone, check_scheduler, make, run

NUM_STEPS = 20_000 * int(os.environ.get("KVTIER_SOAK", "1"))
SALTS = (b"", b"", b"a", b"a\0x", b"b")


def add(scheduler, name, prompt, new, hints, *, now=0.0, salt=b""):
    made = Request(name, Chain(scheduler.manager.namespace, list(prompt), salt=salt), new, hints=hints)
    scheduler.add(made, now)
    return made


def test_closing_a_session_sets_the_hint_of_unfinished_requests():
    scheduler = make(20, policy="learned")
    mine = add(scheduler, "mine", [1] * 8, 2, Hints("s"))
    other = add(scheduler, "other", [2] * 8, 2, Hints("s"), salt=b"b")
    assert scheduler.close_session("s", b"", 0.0) == 0
    assert (mine.hints.session_over, other.hints.session_over) == (True, False)


def test_close_of_ended_session_counts_its_blocks():
    scheduler = make(20, policy="learned")
    add(scheduler, "mine", [1] * 8, 1, Hints("s"))
    run(scheduler, Device())
    assert scheduler.close_session("s", b"b", 0.0) == 0
    assert scheduler.close_session("s", b"", 0.0) == 2
    assert scheduler.close_session("s", b"", 0.0) == 0


def random_hints(rng):
    seconds = rng.choice([None, None, 0.0, 20.0, 1e6])
    return Hints(rng.choice(["", "one", "two", "three"]), rng.random() < 0.3, seconds)


def test_random_hints_with_learned_policy_change_no_answer():
    """Run at least NUM_STEPS steps of schedulers with the learned policy, random hints and random closes."""
    rng, num_steps, num_fits = random.Random(0), 0, 0
    while num_steps < NUM_STEPS:
        host = rng.choice([None, HostConfig(rng.choice([4, 12, 40]), policy="learned")])
        scheduler, device = make(rng.choice([6, 9, 20]), policy="learned", host=host), Device()
        tracker = scheduler.manager.tree.tracker
        tracker.first_fit = tracker.state.until_fit = 4
        requests, now = [], 0.0
        for number in range(200):
            now += rng.choice([0.1, 1.0, 50.0])
            prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 14)))
            options = {"now": now, "salt": rng.choice(SALTS)}
            requests.append(
                (add(scheduler, str(number), prompt, rng.randint(1, 6), random_hints(rng), **options), prompt)
            )
            if rng.random() < 0.2:
                scheduler.close_session(rng.choice(["one", "two", "none"]), rng.choice(SALTS), now)
            if rng.random() < 0.05:
                scheduler.cancel(rng.choice(requests)[0], now)
            for _ in range(rng.randint(1, 6)):
                step = scheduler.schedule(now)
                scheduler.update(step, device.run(step, scheduler=scheduler), now)
                device.move(scheduler, rng.randint(0, 3), ok=rng.random() < 0.9)
                num_steps += 1
            if number % 10 == 0:
                check_scheduler(scheduler)
        run(scheduler, device, check=False)
        check_scheduler(scheduler)
        num_fits += tracker.table.is_fitted
        for each, prompt in requests:
            new = tuple(each.chain.tokens.tolist())[len(prompt) :]
            assert new == alone(prompt, len(new))
    assert num_fits > 0
