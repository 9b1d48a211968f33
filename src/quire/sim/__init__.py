"""Simulations, replays and a demonstration of the scheduler, without a model."""
