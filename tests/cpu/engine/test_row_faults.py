"""If a row fails at any stage of a step, the tokens, texts and log-probabilities of all other rows do not change."""

import pytest

from fault_support import STAGES, check_row_faults
from kvtier.engine import load_model
from kvtier.engine.ops_invariant import InvariantOps


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint("llama")[0], ops=InvariantOps())


@pytest.mark.filterwarnings("ignore:.*(proposer failed|no draft)")
@pytest.mark.parametrize("stage", STAGES)
def test_engine_row_fault_ends_that_row_only(model, stage, monkeypatch):
    check_row_faults(model, stage, monkeypatch)
