"""Hydra config groups; shipped as `zorro_verl.configs`, found with `hydra.searchpath=[pkg://zorro_verl.configs]`."""
