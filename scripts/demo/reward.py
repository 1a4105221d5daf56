"""The reward of the demo's run, which veRL loads by path: reasoning-gym's own verifier of the task."""

import json
from functools import lru_cache

from reasoning_gym import get_score_answer_fn

verifier_of = lru_cache(maxsize=None)(get_score_answer_fn)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """veRL's signature; the whole problem travels as JSON in `extra_info`, because the verifiers ask for all of it."""
    return float(verifier_of(data_source)(solution_str, json.loads(extra_info["problem"])))
