"""Planted bugs: ways in which private training breaks, and the checks that must catch each of them."""
