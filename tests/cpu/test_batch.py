"""The life cycle of a batch: ops, the environment, the states of a pipeline slot, and the entries that modules use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.batch import BATCH, COPY, BatchData, BatchOp, Environment, Key, Module, check_modules
from kvtier.errors import ArgumentError, StateError
from kvtier.memory import BatchCopy
from kvtier.state import Permutation

PER_BATCH = [op for op in BatchOp if op.per_batch]
TOKENS, LOGITS = Key("tokens", list), Key("logits", float)


def begun_batch():
    batch = BatchData(0)
    batch.begin(0, Permutation.identity(2), ["a", "b"], [3, 4])
    return batch


# ---- ops ----


def test_batch_ops_and_executor_ops_have_a_fixed_order():
    assert [op.value for op in BatchOp] == ["add", "setup", "prepare", "forward", "unprep", "fetch", "update", "remove"]
    assert [op.name for op in BatchOp if op.side == "executor"] == ["PREPARE", "FORWARD", "UNPREP"]


def test_module_methods_do_nothing_by_default():
    for op in BatchOp:
        getattr(Module(), op.value)(Environment() if op.per_batch else [])


# ---- environment ----


def test_environment_returns_produced_values():
    env = Environment()
    assert env.produce(TOKENS, [1]) == [1]
    assert env.at(TOKENS) == [1]


def test_environment_misuse_raises_with_known_entries():
    env = Environment()
    with pytest.raises(StateError, match=r"no tokens \(list\).*known: nothing"):
        env.at(TOKENS)
    env.produce(TOKENS, [1])
    env.produce(LOGITS, 0.5)
    with pytest.raises(StateError, match="already exists"):
        env.produce(TOKENS, [2])
    with pytest.raises(StateError, match=r"no batch.*known: tokens \(list\), logits \(float\)"):
        env.at(BATCH)
    with pytest.raises(ArgumentError, match=r"logits \(float\) cannot be read as logits \(str\)"):
        env.at(Key("logits", str))
    with pytest.raises(ArgumentError, match="cannot hold a int"):
        Environment().produce(TOKENS, 5)


def test_environment_holds_batch_and_copy():
    env, batch, copy = Environment(), begun_batch(), BatchCopy()
    env.produce(BATCH, batch)
    env.produce(COPY, copy)
    assert env.at(BATCH) is batch
    assert env.at(COPY) is copy


# ---- modules ----


class Reader(Module):
    reads = frozenset([TOKENS, BATCH])


class Writer(Module):
    writes = frozenset([TOKENS])


def test_check_modules_requires_one_writer_per_entry():
    check_modules([Reader(), Writer()], [BATCH, COPY])
    with pytest.raises(ArgumentError, match=r"Reader reads tokens \(list\), which no module writes; written: batch"):
        check_modules([Reader()], [BATCH, COPY])
    with pytest.raises(ArgumentError, match=r"Writer writes tokens.*Writer already writes"):
        check_modules([Writer(), Writer()], [BATCH])


# ---- states of a pipeline slot ----


def test_batch_data_reports_its_sizes():
    batch = BatchData(1)
    batch.begin(4, Permutation([1, 9, 0], 2), ["x", "y", "z"], [5, 6])  # the second of 3 rows is new
    assert (batch.phase, batch.sequence, batch.bs0, batch.bsz) == (1, 4, 2, 3)
    assert batch.global_token_num == 11


def test_batch_data_with_invalid_arguments_raises():
    with pytest.raises(ArgumentError, match="2 rows needs 2 requests, got 1"):
        BatchData(0).begin(0, Permutation.identity(2), ["a"], [1])
    batch = begun_batch()
    with pytest.raises(StateError, match="ADD cannot run, because phase 0 needs SETUP next"):
        batch.check(BatchOp.ADD)
    batch.abandon()
    with pytest.raises(StateError, match="SETUP cannot run, because phase 0 is free"):
        batch.check(BatchOp.SETUP)


class SlotMachine(RuleBasedStateMachine):
    """Tries ops in random order. A pipeline slot (BatchData) accepts only the op that is next in the life cycle."""

    @initialize()
    def start(self):
        # `done` is the number of finished ops of the batch, or None while the slot is free
        self.batch, self.done, self.step = BatchData(0), None, 0

    @rule(op=st.sampled_from(list(BatchOp)))
    def try_op(self, op):
        expected_op = None if self.done is None else PER_BATCH[self.done]
        if op is expected_op:
            self.batch.finish(op)
            self.done = None if op is BatchOp.UPDATE else self.done + 1
        else:
            with pytest.raises(StateError):
                self.batch.finish(op)

    @rule()
    def begin(self):
        if self.done is None:
            self.batch.begin(self.step, Permutation.identity(1), ["a"], [1])
            self.done = 0
            self.step += 1
        else:
            with pytest.raises(StateError, match="is not finished"):
                self.batch.begin(self.step, Permutation.identity(1), ["a"], [1])

    @rule()
    def abandon(self):
        self.batch.abandon()
        self.done = None

    @invariant()
    def slot_is_free_between_steps(self):
        if hasattr(self, "batch"):
            assert (self.batch.next_op is None) == (self.done is None)


TestSlot = SlotMachine.TestCase
TestSlot.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
