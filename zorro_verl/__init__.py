"""zorro-verl: train GRPO and PPO actors in veRL without recomputing the shared prompt for every rollout.

Read in the order the data flows: `grouping` -> `packing` -> `varlen`, `attention` -> `log_probs` -> `models` ->
`batching` -> `actor` -> `trainer`. Importing this package imports torch at most.
"""

__version__ = "0.1.0"
