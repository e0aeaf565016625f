"""`TextSampler`: what a model writes while it learns.

Owns when the user's function is called, and that an error in it stays with it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from instrument.kinds import is_whole


class TextSampler:
    """Calls a function of the user's every few steps, and gives its text to the writers.

    The function runs in the training thread, between two steps, since MindSpore's networks must not be called from two
    threads at once. Its time is left out of `step_time`. An error in it is reported once and counted, and training goes on.
    It should leave the network in training mode, and draw random numbers from a generator of its own: training gets what it
    leaves behind.

    Args:
        generate: `generate(prompt) -> text`, such as a loop that feeds a language model its own output.
        prompts: What to begin with; each has a text of its own, which is recorded as `sample/<position>`.
        every: Steps from one sample to the next. The first is made after step `every` (of several ranks, after the step
            behind it, whose number it has), and one more at the end of training.

    Raises:
        ValueError: There is no prompt, or `every` is not a positive integer.
        TypeError: `generate` cannot be called, or a prompt is no text.

    Examples:
        >>> sampler = TextSampler(lambda prompt: prompt + "!", ["def "], every=100)
        >>> sampler.sample()
        {'sample/0': 'def !'}
    """

    def __init__(self, generate: Callable[[str], str], prompts: Sequence[str], every: int):
        if not callable(generate):
            raise TypeError(f"generate must be a function of a prompt that returns a text, but it is {generate!r}.")
        if isinstance(prompts, str):
            raise TypeError(f"prompts must be a list of texts, but it is the text {prompts!r}. Use [{prompts!r}].")
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TypeError(f"prompts must be a list of texts, but it holds {prompt!r}.")
        if not prompts:
            raise ValueError("prompts must hold at least one text; use [\"\"] for a function that needs none.")
        if not is_whole(every) or every < 1:
            raise ValueError(f"every must be a positive number of steps, but it is {every!r}.")
        self.generate, self.prompts, self.every = generate, list(prompts), every
        self._next: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether a sample has to be made after step `step`; asked once a step, in order."""
        if self._next is None or step < self._next - self.every:  # the first, or a run that went back
            self._next = (step - 1) // self.every * self.every + self.every
        if step < self._next:
            return False
        self._next = step // self.every * self.every + self.every
        return True

    def sample(self) -> dict[str, str]:
        """Call the function for each prompt: `{"sample/<position>": text}`."""
        return {f"sample/{i}": str(self.generate(prompt)) for i, prompt in enumerate(self.prompts)}
