"""Which sequences run in the next step, with how many tokens, and in which KV blocks."""
