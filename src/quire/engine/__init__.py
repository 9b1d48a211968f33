"""The loop around a scheduler and an executor, in this process or another."""
