"""`verify` itself, its coins and its draws, has the law that is enumerated from the rule's parts."""

import numpy as np
import pytest

from mtpjax.decoding.verify import BLOCK, REJECTION, typical
from tests.exactness.exact import one_set, random_case
from tests.exactness.simulate import verify_p_value
from tests.exactness.statistics import LEVEL


@pytest.mark.parametrize("rule", [REJECTION, BLOCK, typical()], ids=lambda rule: rule.name)
def test_verify_alone_has_the_enumerated_law(rule):
    """What `verify` draws, against the law enumerated from the rule's parts: lossy rules too."""
    case = random_case(np.random.default_rng(3), 3, 2, 12, "sampled")
    p = [verify_p_value(rule, one_set(case, at), 20_000) for at in range(2)]
    assert min(p) > LEVEL / 8, p
