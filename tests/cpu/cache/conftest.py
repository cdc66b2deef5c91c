from __future__ import annotations

import pytest

from controller_support import Rig


@pytest.fixture
def rigs():
    """Return a function that creates a Rig. The fixture closes the controllers of all rigs."""
    made: list[Rig] = []

    def make(*arguments, **options) -> Rig:
        made.append(Rig(*arguments, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.controller.close()
