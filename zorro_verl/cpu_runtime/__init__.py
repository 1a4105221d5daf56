"""What veRL lacks to run its own trainer on a CPU: a platform and a rollout server over `generate`."""
