"""Two streams at once in an asyncio program; the engine runs in a process of its own."""

from __future__ import annotations

import asyncio

from quire import AsyncLLM, RequestOutputKind, SamplingParams


async def tell(llm: AsyncLLM, request_id: str, prompt: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params, request_id):
        print(f"{request_id}: {output.outputs[0].text!r}")


async def main() -> None:
    async with AsyncLLM("embedded", max_num_seqs=8) as llm:
        await asyncio.gather(tell(llm, "boat", "The boat"), tell(llm, "bird", "The bird"))


if __name__ == "__main__":  # the engine's process imports this file again
    asyncio.run(main())
