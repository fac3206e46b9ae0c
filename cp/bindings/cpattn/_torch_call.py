"""One call of attention on torch tensors: arguments checked, agreed by all ranks, and planned."""

from __future__ import annotations

import collections
import hashlib
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from cpattn import _cpattn
from cpattn._cpattn import InvalidArgumentError
from cpattn.attention import Attention, Plan, ProblemArguments, problem_arguments
from cpattn.groups import cuda_group, seconds

# Plans kept per group, the least recently used one goes first: enough for the shapes of a model's
# layers, and for packs whose lengths change with every step.
MAX_PLANS = 8

PLANNED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Transformer Engine's masks: whether causal, and whether aligned to the top left where a document
# has more keys than queries (ours is aligned to the bottom right).
_MASKS = {
    "causal": (True, True),
    "padding_causal": (True, True),
    "causal_bottom_right": (True, False),
    "padding_causal_bottom_right": (True, False),
    "no_mask": (False, False),
    "padding": (False, False),
}

# Dimensions of a tensor in each layout.
_FORMATS = {
    "thd": "[tokens, heads, channels]",
    "bshd": "[batch, tokens, heads, channels]",
    "sbhd": "[tokens, batch, heads, channels]",
}


# Lengths that ranks compare one by one, so that a difference is told by its place and values; those
# behind are compared by their digest.
_MAX_LENGTHS_NAMED = 64


def cuda_stream(device: torch.device) -> Tuple[Optional[int], bool]:
    """The handle of torch's current stream of a GPU (0 is the default one), and whether it is in
    capture; None and False on the CPU.

    The one piece of cpattn.torch that no test executes for a GPU: tests replace it, as torch
    without CUDA has no streams.
    """
    if device.type == "cpu":
        return None, False
    with torch.cuda.device(device):
        return torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()


class Call(NamedTuple):
    """What a plan is found by. Without lengths (`cu_seqlens` is None) there is one document: all
    rows of all ranks, which is why the rows belong to it."""

    problem: ProblemArguments
    has_lengths: bool
    q_rows: int
    kv_rows: int
    options: Tuple[Tuple[str, Any], ...]
    isa: Optional[str]
    device: torch.device

    def lines(self, requires_grad: bool) -> str:
        """What must be equal on all ranks, as key=value lines."""
        values = self.problem._asdict()
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            cu = values.pop(name)
            values[f"entries of {name}"] = len(cu)
            values.update((f"{name}[{i}]", end) for i, end in enumerate(cu[:_MAX_LENGTHS_NAMED]))
            if len(cu) > _MAX_LENGTHS_NAMED:
                values[f"digest of {name}"] = _digest(struct.pack(f"={len(cu)}q", *cu))
        values.update(self.options, isa=self.isa, requires_grad=requires_grad)
        values["device"] = self.device.type  # each rank has its own GPU
        values.pop("threads")
        return "".join(f"{name}={value}\n" for name, value in values.items())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _check_tensor(name: str, tensor: Any, qkv_format: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{name}: a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"{name}: device {tensor.device}, expected cpu or cuda")
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(f"{name}: layout {tensor.layout}, expected torch.strided")
    if tensor.dtype not in PLANNED_DTYPES and tensor.dtype != torch.float64:
        raise InvalidArgumentError(
            f"{name}: dtype {tensor.dtype}, expected torch.float32, float16, bfloat16, or float64 "
            "for gradcheck"
        )
    expected = _FORMATS[qkv_format]
    if tensor.dim() != expected.count(",") + 1:
        raise InvalidArgumentError(f"{name}: shape {list(tensor.shape)}, expected {expected}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgumentError(
            f"{name}: stride {tensor.stride(-1)} in the last dimension, expected 1; pass "
            f"{name}.contiguous()"
        )


def check_tensors(q: Any, k: Any, v: Any, qkv_format: str) -> None:
    """InvalidArgumentError unless these are tensors that can be attended."""
    if qkv_format not in _FORMATS:
        raise InvalidArgumentError(f"qkv_format: {qkv_format!r}, expected {' | '.join(_FORMATS)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, qkv_format)
        if tensor.dtype != q.dtype:
            raise InvalidArgumentError(f"{name}: dtype {tensor.dtype}, expected q's {q.dtype}")
        if tensor.device != q.device:
            raise InvalidArgumentError(f"{name}: device {tensor.device}, expected q's {q.device}")
    if qkv_format != "thd" and q.shape[qkv_format.index("b")] == 0:
        raise InvalidArgumentError(
            f"q: shape {list(q.shape)} in {qkv_format}, expected a batch of at least 1"
        )
    same_batch = qkv_format == "thd" or all(
        t.shape[qkv_format.index("b")] == q.shape[qkv_format.index("b")] for t in (k, v)
    )
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or not same_batch:
        raise InvalidArgumentError(
            f"q, k, v: shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}, expected k and v "
            "alike but for their channels, and q with k's channels and batch"
        )


def check_maxima(head_maxima: Any, q: torch.Tensor, heads: int) -> None:
    """InvalidArgumentError unless the largest logits of so many heads can be kept there."""
    if not isinstance(head_maxima, torch.Tensor):
        raise InvalidArgumentError(
            f"head_maxima: a {type(head_maxima).__name__}, expected a torch.Tensor"
        )
    found = (head_maxima.dtype, tuple(head_maxima.shape), head_maxima.device)
    expected = (torch.float32, (heads,), q.device)
    if found != expected or not head_maxima.is_contiguous() or head_maxima.requires_grad:
        raise InvalidArgumentError(
            f"head_maxima: {found[0]} {list(found[1])} on {found[2]}, expected contiguous "
            f"{expected[0]} {list(expected[1])} on {expected[2]} without requires_grad"
        )
    if q.dtype == torch.float64:
        raise InvalidArgumentError("head_maxima: with float64, expected None")


def _check_place(group: _cpattn.Group, device: torch.device) -> None:
    # Ranks with their rows in host memory may bring them on GPUs: see placed_group.
    if group.device not in ("cpu", str(device)):
        raise InvalidArgumentError(
            f"q: device {device}, expected {group.device}, where this group's arrays are"
        )


def _causal_by_name(attn_mask_type: str, problem: ProblemArguments) -> bool:
    if attn_mask_type not in _MASKS:
        raise InvalidArgumentError(
            f"attn_mask_type: {attn_mask_type!r}, expected {' | '.join(_MASKS)}"
        )
    causal, is_top_left = _MASKS[attn_mask_type]
    if is_top_left and problem.cu_seqlens_q != problem.cu_seqlens_kv:
        raise InvalidArgumentError(
            f"attn_mask_type: {attn_mask_type!r} is aligned to the top left, expected "
            f"'{attn_mask_type}_bottom_right' where queries and keys differ in number"
        )
    return causal


def _one_mask(
    causal: Optional[bool], attn_mask_type: Optional[str], problem: ProblemArguments
) -> bool:
    if attn_mask_type is None:
        return True if causal is None else causal
    named = _causal_by_name(attn_mask_type, problem)
    if causal is not None and causal != named:
        raise InvalidArgumentError(
            f"causal: {causal!r}, expected {named} or None with attn_mask_type {attn_mask_type!r}"
        )
    return named


def checked_call(
    group: _cpattn.Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: Any,
    cu_seqlens_kv: Any,
    causal: Optional[bool],
    attn_mask_type: Optional[str],
    softmax_scale: Optional[float],
    config: Dict[str, Any],
) -> Call:
    """The call that [tokens, heads, channels] tensors and these arguments make."""
    _check_place(group, q.device)
    if q.dtype == torch.float64 and q.device.type != "cpu":
        raise InvalidArgumentError(
            f"q: dtype torch.float64 on {q.device}, expected float32, float16 or bfloat16: float64 "
            "is for gradcheck on the CPU"
        )
    if q.dtype == torch.float64 and group.size > 1:
        raise InvalidArgumentError(
            f"q: dtype torch.float64 on {group.size} ranks, expected float32, float16 or bfloat16: "
            "float64 is for gradcheck on one rank (group=cpattn.self_group())"
        )
    if cu_seqlens is None and cu_seqlens_kv is not None:
        raise InvalidArgumentError("cu_seqlens: None, expected lengths, as cu_seqlens_kv has them")
    problem = problem_arguments(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        softmax_scale=softmax_scale,
        cu_seqlens=(0,) if cu_seqlens is None else cu_seqlens,
        cu_seqlens_kv=cu_seqlens_kv,
        dtype=q.dtype if q.dtype in PLANNED_DTYPES else torch.float32,
    )
    causal = _one_mask(causal, attn_mask_type, problem)
    config = {"threads": torch.get_num_threads(), **config}
    isa = config.pop("isa", None)
    options = Attention(group, causal=causal, isa=isa, **config).options
    seconds(options["timeout"])  # all wait that long before anything is planned
    call = Call(
        problem,
        cu_seqlens is not None,
        q.shape[0],
        k.shape[0],
        tuple(options.items()),
        isa,
        q.device,
    )
    local_problem(call)  # lengths that cannot be stated are this rank's complaint, not its end
    return call


class _News(NamedTuple):
    """What a call needs that it has not got: a plan, a group on GPUs."""

    plan: bool
    group: bool


def _exchange(
    group: _cpattn.Group, call: Optional[Call], complaint: str, requires_grad: bool, news: _News
) -> Tuple[List[Tuple[int, int]], _News]:
    """Everybody's rows, and what anybody needs. One small message per peer unless something is
    wrong; then the same InvalidArgumentError on all ranks."""
    rows = (0, 0) if call is None else (call.q_rows, call.kv_rows)
    if group.size == 1:
        group.agree("", complaint)
        return [rows], news
    lines = "" if call is None else call.lines(requires_grad)
    timeout = 60.0 if call is None else dict(call.options)["timeout"]
    digest = _digest(lines.encode() + (b"refused" if complaint else b"")).encode()
    mine = digest + struct.pack("=2q2?", *rows, *news)
    everybody = [(b[:16], struct.unpack("=2q2?", b[16:])) for b in group.all_gather(mine, timeout)]
    if complaint or any(theirs != digest for theirs, _ in everybody):
        group.agree(lines, complaint, timeout)
    of_all = [numbers for _, numbers in everybody]
    needs = _News(any(n[2] for n in of_all), any(n[3] for n in of_all))
    return [(q_rows, kv_rows) for q_rows, kv_rows, _, _ in of_all], needs


def with_lengths(call: Call, rows: List[Tuple[int, int]]) -> ProblemArguments:
    if call.has_lengths:
        return call.problem
    return call.problem._replace(
        cu_seqlens_q=(0, sum(q for q, _ in rows)), cu_seqlens_kv=(0, sum(kv for _, kv in rows))
    )


def local_problem(call: Call) -> _cpattn.Problem:
    """The problem if this rank's rows were all there are: what the reference computes."""
    return _cpattn.Problem(*with_lengths(call, [(call.q_rows, call.kv_rows)]))


def _placed_group(group: _cpattn.Group, device: torch.device) -> Optional[_cpattn.Group]:
    """The group of the same ranks whose arrays are on the device, kept with `group`; None where it
    has not been made. Its exchange is "auto"; pass a `cuda_group` for another one."""
    if device.type == "cpu" or group.device != "cpu":
        return group
    return group.__dict__.setdefault("_cuda_groups", {}).get(device.index)


def _plans_of(group: _cpattn.Group) -> "collections.OrderedDict[Call, Plan]":
    return group.__dict__.setdefault("_torch_plans", collections.OrderedDict())


def agreed_plan(
    group: _cpattn.Group, call: Optional[Call], complaint: str, requires_grad: bool
) -> Plan:
    """The plan of a call, kept with the group it is on. Collective.

    All ranks make a new one together, or use the one they have. A rank that refuses its arguments
    says so in `complaint`, and all raise InvalidArgumentError.
    """
    news = _News(False, False)
    if call is not None:
        placed = _placed_group(group, call.device)
        news = _News(placed is None or call not in _plans_of(placed), placed is None)
        if news.plan and not complaint and cuda_stream(call.device)[1]:
            complaint = "stream: in capture, expected a call like this one before: a warm-up"
    rows, news = _exchange(group, call, complaint, requires_grad, news)
    assert call is not None, "a rank without a call has a complaint, and that was raised"
    if news.group:
        group.__dict__["_cuda_groups"][call.device.index] = cuda_group(
            group, device=call.device.index, timeout=dict(call.options)["timeout"]
        )
    placed = _placed_group(group, call.device)
    assert placed is not None, "there was one, or it was made"
    plans = _plans_of(placed)
    if call in plans and not news.plan:
        plans.move_to_end(call)
        return plans[call]
    options = dict(call.options)
    causal = options.pop("mask") == "causal"
    attention = Attention(placed, causal=causal, isa=call.isa, **options)
    plans.pop(call, None)
    plans[call] = attention.make(with_lengths(call, rows))
    while len(plans) > MAX_PLANS:
        plans.popitem(last=False)
    return plans[call]
