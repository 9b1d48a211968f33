"""An ordinary class, and twenty prompts as users write them to get objects of it."""

from __future__ import annotations

from pydantic import BaseModel, Field

SAMPLING = {"temperature": 0, "frequency_penalty": 0.5}
"""Nothing is left to chance, and a small model does not say the same words until its context is full."""


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The person's name")
    age: int = Field(description="The person's age in years")
    job: str | None = Field(default=None, description="What the person does for a living")
    hobbies: list[str] = Field(default_factory=list, description="What the person likes to do")


PROMPTS = (
    "John is 25 years old.",
    "Extract: Jason is 30 years old and works as a carpenter.",
    "My sister Anna turned 12 last week. She likes to swim.",
    "Maria, a 41-year-old nurse from Lisbon, plays chess.",
    "Who is this? Tom, 7, loves dinosaurs and drawing.",
    "Grandma Ruth is eighty-two. She bakes and she sings.",
    "Please extract the person: Ahmed (35), software engineer, likes hiking.",
    "The teacher, Mr. Lee, is 50.",
    "Lily was a little girl. She was three years old. She loved to play outside with her ball.",
    "Ben is a doctor. Ben is 44. Ben reads and runs.",
    "I am Sofia, 29, and I paint for a living.",
    "Extract user details: Peter Parker, 21, photographer, climbing.",
    "Once upon a time there was a boy named Tim. He was five. He had a red truck.",
    "Dr. Jane Smith, aged 60, has worked as a surgeon for thirty years.",
    "A man called Bob, 33, sells fish at the market.",
    "My neighbour Olga is 70 and keeps bees.",
    "Name: Carlos. Age: 18. Job: student. Hobbies: football, guitar, cooking.",
    "Emma is older than Max, who is 9. Emma is 11.",
    "Tell me about a person who likes boats.",
    "Invent a person.",
)
