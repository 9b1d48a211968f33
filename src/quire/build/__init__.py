"""The old name of `quire.assembly`, until 0.3."""
