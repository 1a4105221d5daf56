"""The reward of a recipe's tiny form: the recipe's own, and up to a tenth for digits.

A random model hardly ever earns the first: all answers of a prompt would be worth the same, and nothing be trained.
"""

from verl.utils.import_utils import load_extern_object
from verl.utils.reward_score import default_compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None, recipe_reward=None, **others) -> float:
    """veRL's signature; ``recipe_reward`` is the file of the recipe's own ``compute_score``, if it has one."""
    own = load_extern_object(recipe_reward, "compute_score") if recipe_reward else default_compute_score
    score = own(data_source, solution_str, ground_truth, extra_info)
    digits = sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
    return float(score) + 0.1 * digits
