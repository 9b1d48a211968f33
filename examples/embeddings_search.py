"""Find the text that is nearest in meaning to a question, by the embeddings of both."""

from __future__ import annotations

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
texts = ["The dog ran after the ball.", "The boat sailed on the sea.", "Mom baked a cake in the kitchen."]
question = "A puppy chased a ball."
vectors = [each.embedding for each in client.embeddings.create(model="embedded", input=[*texts, question]).data]
*found, wanted = vectors  # each of length 1, so that a dot product is the cosine of the angle
scores = [sum(a * b for a, b in zip(vector, wanted, strict=True)) for vector in found]
for score, text in sorted(zip(scores, texts, strict=True), reverse=True):
    print(f"{score:.3f} {text}")
