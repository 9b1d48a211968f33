"""A scheduling policy of your own: the shortest request first. For a server, run it in this folder:

quire serve --scheduling-policy scheduling_policy:ShortestFirst
"""

from __future__ import annotations

from quire import LLM, SamplingParams
from quire.scheduler.policy import SchedulingPolicy
from quire.types import Request


class ShortestFirst(SchedulingPolicy):
    """Requests wait in the order of the most tokens that they can come to."""

    def key(self, request: Request) -> float:
        """Lower is sooner."""
        return len(request.prompt) + request.max_new_tokens


if __name__ == "__main__":
    with LLM("embedded", max_num_seqs=1, scheduling_policy="scheduling_policy:ShortestFirst") as llm:
        lengths = (24, 12, 4)
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        for output in llm.generate(["Once upon a time"] * len(lengths), params):
            print(len(output.outputs[0].token_ids), "tokens:", output.outputs[0].text)
