"""A Llama of random weights that counts down: its answers stop at their own length, and every answer can be checked.

    python benchmarks/countdown.py 8B /dev/shm/countdown-8B        write the model's folder; 1B and tiny likewise

A prompt is filler words whose last one, c<n+1>, decides the answer: c<n> c<n-1> … c1 and the end token, n useful
tokens. No engine can know n beforehand: max_new_tokens is the same for all requests.

- How: the head's row of each chain token is the embedding of the token one above it (and the end token's that of c1),
  so the token that is most like the last one is the next of the countdown. Everything else is random.
- All layers are dense and random, each with values of its own, and none is zero (zeros run faster). What they add to
  the residual stream is kept small: EPSILON of the embedding a projection, 0.3 of it after 32 layers.
- The margin: logits have a standard deviation of about 1, and the right one is the square root of the hidden size: 64
  for 8B, 45 for 1B, 11 for tiny. bfloat16 keeps that order, in any batch and with any kernel, so answers are compared
  exactly. Embedding and head are not tied.
- A word is a token, so a text of n words has n tokens. There is no chat template: a base model.
- The same shape, seed and kind of device give the same bytes (a GPU draws other numbers than a CPU).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Ids: the end token is c0, and the token after id i of the chain is i - 1.
PAD, UNKNOWN, END, MOST = 0, 1, 2, 1024
CHAIN_END = END + MOST + 2  # c1 … c1025
EPSILON = 0.05
CONTEXT_TOKENS = 4096
#: What is written at once: files of about a gigabyte, by a few threads.
FILE_BYTES, WRITERS = 2**30, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def kv(self) -> int:
        """Keys, or values, of one token in one layer."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' matrices; the norms are not worth counting."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights of the head; the embedding has as many, of which a token reads one row."""
        return self.hidden * self.vocabulary


#: Llama 3.2 1B (but not tied) and Llama 3.1 8B; tiny and deep are for tests.
SHAPES = {
    "8B": Shape(4096, 14336, 32, 32, 8, 128256),
    "1B": Shape(2048, 8192, 16, 32, 8, 128256),
    "deep": Shape(128, 256, 32, 4, 2, 2048),
    "tiny": Shape(128, 256, 2, 4, 2, 2048),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths in tokens: half of the prompts are shorter than their median, and some are far longer."""

    prompt_median: float = 180.0
    answer_median: float = 160.0
    sigma: float = 0.8
    most: int = MOST
    fewest_prompt: int = 4

    def draw(self, count: int, seed: int) -> list[tuple[int, int]]:
        """(prompt tokens, answer tokens) of each request; the order is the file's, so nothing is sorted."""
        stream = np.random.default_rng(seed)
        prompts = self._drawn(stream, count, self.prompt_median, self.fewest_prompt)
        return list(zip(prompts, self._drawn(stream, count, self.answer_median, 1), strict=True))

    def _drawn(self, stream: np.random.Generator, count: int, median: float, fewest: int) -> list[int]:
        drawn = stream.lognormal(np.log(median), self.sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), fewest, self.most)]


@dataclass(frozen=True, slots=True)
class Item:
    """One request: what is asked, and how many tokens the answer has."""

    id: str
    prompt: str
    answer_tokens: int

    @property
    def answer(self) -> str:
        """The only right answer."""
        return " ".join(f"c{number}" for number in range(self.answer_tokens, 0, -1))


def items(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int) -> list[Item]:
    """Requests of these lengths; another seed gives other filler, so that no cache of prefixes knows a prompt."""
    stream = np.random.default_rng(seed)
    found = []
    for number, (prompt_tokens, answer_tokens) in enumerate(lengths):
        filler = [f"w{word}" for word in stream.integers(CHAIN_END, vocabulary, prompt_tokens - 1)]
        found.append(Item(f"r{number}", " ".join([*filler, f"c{answer_tokens + 1}"]), answer_tokens))
    return found


def words(vocabulary: int) -> list[str]:
    """The text of every token id."""
    chain = [f"c{number}" for number in range(1, MOST + 2)]
    return ["<pad>", "<unk>", "<eos>", *chain, *(f"w{number}" for number in range(CHAIN_END, vocabulary))]


def make_model(folder: Path, shape: Shape, seed: int = 0, device: str = "cpu") -> Path:
    """Write config, bfloat16 safetensors and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, shape.vocabulary)
    _write_config(folder, shape)
    places: dict[str, str] = {}
    with ThreadPoolExecutor(WRITERS) as writers:
        waiting: deque[Future[None]] = deque()
        for number, tensors in enumerate(_files(shape, seed, device)):
            name = f"model-{number:03}.safetensors"
            places |= dict.fromkeys(tensors, name)
            waiting.append(writers.submit(_save, tensors, folder / name))
            while len(waiting) > WRITERS:  # what waits to be written is in memory
                waiting.popleft().result()
        for written in waiting:
            written.result()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tensors_of(shape: Shape, seed: int, device: str) -> Iterator[tuple[str, Any]]:
    """Every tensor of the model in bfloat16, each drawn once, in one order."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        drawn = torch.randn((rows, columns), generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(deviation)

    embedding = normal(shape.vocabulary, shape.hidden, 1.0)
    head = normal(shape.vocabulary, shape.hidden, 0.5 * shape.hidden**-0.5)
    head[END : CHAIN_END - 1] = embedding[END + 1 : CHAIN_END] * shape.hidden**-0.5
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
    for layer in range(shape.layers):
        for part, weight in _layer(shape, normal):
            yield f"model.layers.{layer}.{part}.weight", weight
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{part}.weight", torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)


def _layer(shape: Shape, normal: Callable[[int, int, float], Any]) -> Iterator[tuple[str, Any]]:
    """Projections that keep a variance of 1, but for the two that write into the residual stream."""
    hidden, inner, kv = shape.hidden, shape.intermediate, shape.kv
    yield "self_attn.q_proj", normal(hidden, hidden, hidden**-0.5)
    yield "self_attn.k_proj", normal(kv, hidden, hidden**-0.5)
    yield "self_attn.v_proj", normal(kv, hidden, hidden**-0.5)
    yield "self_attn.o_proj", normal(hidden, hidden, EPSILON * hidden**-0.5)
    yield "mlp.gate_proj", normal(inner, hidden, hidden**-0.5)
    yield "mlp.up_proj", normal(inner, hidden, hidden**-0.5)
    yield "mlp.down_proj", normal(hidden, inner, EPSILON * inner**-0.5)


def _files(shape: Shape, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """The tensors in the host's memory, so many together as a file is to hold."""
    held: dict[str, Any] = {}
    for name, tensor in tensors_of(shape, seed, device):
        held[name] = tensor.cpu()
        if sum(each.nbytes for each in held.values()) >= FILE_BYTES:
            yield held
            held = {}
    if held:
        yield held


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _write_config(folder: Path, shape: Shape) -> None:
    from transformers import GenerationConfig, LlamaConfig

    ends: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}
    LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        **ends,
    ).save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: place for place, word in enumerate(words(vocabulary))}
    plain = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)


def main() -> None:
    """Shape and folder in, a model folder out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import torch

    start = time.monotonic()
    make_model(args.folder, SHAPES[args.shape], args.seed, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{args.folder} written in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
