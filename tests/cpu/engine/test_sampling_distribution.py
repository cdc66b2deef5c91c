"""For every combination of sampling parameters, sampled tokens follow the computed distribution."""

import pytest

from sampling_support import CASES, NUM_DRAWS, check_draws, chi_square_deviation


@pytest.mark.parametrize("vocab", [50, 64], ids=["torch", "native"])
@pytest.mark.parametrize("params", CASES, ids=lambda params: f"{params.seed}")
def test_draws_follow_the_computed_distribution(params, vocab):
    check_draws(params, vocab, "cpu")


def test_chi_square_rejects_share_of_51_instead_of_50_percent():
    wrong = [(NUM_DRAWS * share, int(NUM_DRAWS * actual)) for share, actual in ((0.50, 0.51), (0.50, 0.49))]
    assert chi_square_deviation(wrong) > 4.0
    assert chi_square_deviation([(NUM_DRAWS / 2, NUM_DRAWS // 2 + 100), (NUM_DRAWS / 2, NUM_DRAWS // 2 - 100)]) < 4.0
