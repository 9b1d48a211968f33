"""Generate in this process, without a server: all prompts run in the same steps."""

from __future__ import annotations

from quire import LLM, SamplingParams

prompts = ["Once upon a time", "The little dog", "One day, a girl"]
with LLM("embedded", max_num_seqs=8) as llm:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24)
    for output in llm.generate(prompts, params):
        print(output.prompt + output.outputs[0].text)
