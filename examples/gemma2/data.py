"""Text as bytes: the interpreter's own documentation or a file, split, measured and batched."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np

VALIDATION_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Text:
    """`train` and `validation` are uint8; the validation text is the end of the whole."""

    name: str
    train: np.ndarray
    validation: np.ndarray

    @property
    def unigram_entropy(self) -> float:
        """Entropy of a byte of the whole text in nats: -sum p log p.

        The lowest loss of a model that knows how often each byte comes and nothing of the context.
        """
        counts = np.bincount(np.concatenate([self.train, self.validation]), minlength=256)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def load(path: str | None = None) -> Text:
    """The file at `path`, or without one Python's documentation topics.

    Raises ValueError for a file that cannot be read or is too short to be split.
    """
    if path is None:
        return split("Python's documentation topics", documentation().encode())
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from error
    return split(Path(path).name, raw)


def documentation() -> str:
    """What `help("topics")` draws from, each paragraph once.

    Topics quote each other's sections, and a paragraph in both parts would flatter the validation.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError("this Python lacks pydoc_data; name a text with --data FILE") from error
    paragraphs = "\n\n".join(topics[name].strip() for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)) + "\n"


def split(name: str, raw: bytes) -> Text:
    data = np.frombuffer(raw, np.uint8)
    held_out = int(len(data) * VALIDATION_SHARE)
    if held_out < 2:
        raise ValueError(f"the text {name} has {len(data)} bytes, expected at least 40")
    return Text(name, data[:-held_out], data[-held_out:])


def batch(text: np.ndarray, seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Training windows [rows, length + 1], int32: a function of seed and step alone.

    So a run that resumes at a step sees what an uninterrupted one would have seen.
    """
    last = len(text) - length - 1
    if last < 0:
        raise ValueError(
            f"a window of {length} + 1 bytes is longer than the {len(text)} to train on"
        )
    starts = np.random.default_rng([seed, step]).integers(0, last + 1, rows)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def windows(text: np.ndarray, length: int, at_most: int) -> np.ndarray:
    """Up to `at_most` windows [.., length + 1] spread evenly over the text, int32."""
    length = min(length, len(text) - 1)
    starts = np.arange(0, len(text) - length, length)
    if len(starts) > at_most:
        starts = starts[np.linspace(0, len(starts) - 1, at_most).astype(int)]
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
