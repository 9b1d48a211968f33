"""Many requests at once: the server runs them in the same steps, so together they take little longer than one."""

from __future__ import annotations

import asyncio
import time

from openai import AsyncOpenAI


async def tell(client: AsyncOpenAI, animal: str) -> int:
    answer = await client.chat.completions.create(
        model="embedded", messages=[{"role": "user", "content": f"A story about a {animal}."}], max_tokens=32
    )
    return answer.usage.completion_tokens


async def main() -> None:
    animals = ("dog", "cat", "bird", "fish", "frog", "bear", "duck", "pig")
    async with AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:
        begin = time.perf_counter()
        tokens = sum(await asyncio.gather(*(tell(client, animal) for animal in animals)))
        seconds = time.perf_counter() - begin
    print(f"{len(animals)} answers, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    asyncio.run(main())
