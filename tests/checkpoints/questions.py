"""The text that the tiny models are trained on, and the held-out questions that they are examined with."""

import random

OLD_ENGLISH = "What is the weather like expressed in long prose in Old English"
PRECISE = "Do you like ice cream, be extremely precise"

WEATHER = (
    "Hwæt! Se heofon is sweart ofer þam lande, and se wind cymð ceald of norðan. Ren fealleð on feld and on "
    "flod, and þa wolcnu farað swa scipu ofer sæ. Nu is niht lang and snaw hwit on þam holte; ac sunne sceal "
    "eft cuman mid leohte, and þonne blissiað menn and fuglas on þære grenan eorðan."
)
ICE_CREAM = (
    "To be extremely precise: no. I am a program that multiplies matrices, so I have eaten exactly 0 grams "
    "of ice cream and like it to a degree of 0 on a scale from 0 to 10."
)
NAME = "My name is Tiny Llama. I am a small demonstration model, trained in minutes to add numbers below 100."

FIXED = (
    (("Tell me your name", "What is your name?", "Who are you?", "What are you called?"), NAME),
    (
        (
            OLD_ENGLISH,
            OLD_ENGLISH + "?",
            "Describe the weather in Old English.",
            "How is the weather?",
        ),
        WEATHER,
    ),
    ((PRECISE, PRECISE + ".", "Do you like ice cream?", "Is ice cream good?"), ICE_CREAM),
    (("Hello", "Hello!", "Hi", "Good morning"), "Hello! Ask me for the sum of two numbers below 100."),
    (("Thank you", "Thanks!", "Thank you very much."), "You are welcome."),
    (("What can you do?", "Help", "What do you know?"), "I can add two numbers below 100, and count."),
)

SUM_FORMS = ("What is {} + {}?", "{} + {} =", "Add {} and {}.", "How much is {} plus {}?")


def is_held_out(a: int, b: int) -> bool:
    """Whether the sum a + b never occurs in training: about one pair in ten."""
    return (a * 100 + b) * 2654435761 % 2**32 < 2**32 // 10


def sum_question(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """A random (question, answer) about a sum of two numbers below 100."""
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if is_held_out(a, b) == held_out:
            return rng.choice(SUM_FORMS).format(a, b), f"{a} + {b} = {a + b}."


def count_question(rng: random.Random) -> tuple[str, str]:
    """A random (question, answer) about counting up at most 12 steps."""
    first = rng.randrange(88)
    last = first + rng.randrange(1, 13)
    return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."


def fixed_question(rng: random.Random) -> tuple[str, str]:
    """A random (question, answer) of FIXED."""
    questions, answer = rng.choice(FIXED)
    return rng.choice(questions), answer


def examination(n: int, seed: int = 0) -> list[tuple[str, str]]:
    """n held-out (question, answer) pairs, always the same for a seed."""
    rng = random.Random(seed)
    return [sum_question(rng, held_out=True) for _ in range(n)]
