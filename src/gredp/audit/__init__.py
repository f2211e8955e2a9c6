"""The attacker: tries to refute a claimed ε by playing against the mechanism itself."""
