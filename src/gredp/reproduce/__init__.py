"""What the paper states, measured."""
