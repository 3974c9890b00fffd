"""Keyword arguments that a function does not have: the error names the one that is meant."""

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any

#: What one thing is called: here, in `torch_bridge`, and in other libraries.
_SAME = (
    (
        *("softcap", "soft_cap", "softcapping", "cap", "logit_cap", "logits_cap", "logit_softcap"),
        *("logit_soft_cap", "logits_softcap", "logits_soft_cap", "attn_logits_soft_cap"),
        *("attn_logit_softcapping", "attn_logits_softcap", "attn_logit_softcap", "softcap_value"),
    ),
    ("is_causal", "causal", "use_causal_mask", "self_attn_mask_type"),
    ("num_kv_heads", "num_gqa_groups", "num_key_value_heads", "kv_heads", "n_kv_heads"),
    (
        *("local_window_size", "window_size", "sliding_window", "sliding_window_size", "window"),
        *("attention_window", "window_left"),
    ),
    ("scale", "sm_scale", "softmax_scale", "scaling", "scale_factor"),
    ("mask", "bias", "attn_mask", "attention_mask", "attn_bias", "attention_bias"),
    ("dropout_rate", "dropout_p", "dropout", "dropout_prob", "attention_dropout", "attn_dropout"),
    ("dropout_rng", "generator", "dropout_key", "rng"),
    (
        *("query_segment_ids", "key_value_segment_ids", "segment_ids", "q_segment_ids"),
        *("kv_segment_ids", "decoder_segment_ids"),
    ),
    (
        *("query_positions", "key_value_positions", "positions", "q_positions", "kv_positions"),
        "position_ids",
    ),
    (
        *("query_seq_lengths", "key_value_seq_lengths", "seq_lengths", "seqused_q", "seqused_k"),
        *("q_lengths", "kv_lengths", "cache_seqlens"),
    ),
    (
        *("return_residual", "return_lse", "return_residuals", "return_attn_probs"),
        "return_softmax_lse",
    ),
    ("implementation", "backend", "impl", "attn_implementation"),
    ("sinks", "sink", "attention_sinks", "s_aux", "learnable_sink"),
    ("alibi_slopes", "alibi"),
    ("axis", "axis_name", "cp_axis", "sp_axis", "seq_axis", "sequence_axis"),
    ("query", "q"),
    ("key", "k"),
    ("value", "v"),
)
_NEEDLESS = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "enable_gqa")
_ADVICE = {
    "is_causal": "from the top left; FlashAttention's is causal_alignment='bottom_right'",
    "causal": "from the bottom right",
    "local_window_size": "(left, right), None unbounded; a sliding window of W keys is (W - 1, 0)",
    "window_size": "(left, right), -1 unbounded; a sliding window of W keys is (W - 1, 0)",
    "mask": "boolean, True takes part",
    "bias": "floating, added to the logits",
}


def hint(name: str, known: Collection[str], settings: Collection[str] = ()) -> str:
    """Which of the `known` names `name` stands for, as the end of a sentence; "" if none is near.

    `settings` are known to the constructor of what is called.
    """

    def told(ours: str) -> str:
        advice = [_ADVICE[ours]] if ours in _ADVICE else []
        advice += [] if ours in known else ["given when the object is made"]
        return f"{ours} ({'; '.join(advice)})" if advice else ours

    if name in _NEEDLESS:
        return ": it is not needed, leave it out"
    if name in settings:
        return f": here that is {told(name)}"
    for names in _SAME:
        ours = [x for x in names if x in known] or [x for x in names if x in settings]
        if name in names and ours:
            return f": here that is {(' or ' if 'mask' in ours else ' and ').join(map(told, ours))}"
    close = difflib.get_close_matches(name, [*known, *settings], 1)
    return f": did you mean {told(close[0])}?" if close else ""


def _refuse(
    where: str, known: Collection[str], given: Iterable[str], settings: Collection[str] = ()
) -> None:
    """TypeError unless all that is given is known."""
    for name in given:
        if name not in known:
            what = hint(name, known, settings)
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}{what}")


def bind(function: Callable, arrays: Iterable[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `function` by name, defaults among them."""
    signature = inspect.signature(function)
    _refuse(function.__name__, signature.parameters, keywords)
    bound = signature.bind(*arrays, **keywords)
    bound.apply_defaults()
    return dict(bound.arguments)


def _names(function: Callable, overridden: Callable) -> frozenset[str]:
    """Of its keyword arguments; where it takes any, it hands them to the function that it overrides."""
    found: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            found.add(name)
        elif typing.get_origin(parameter.annotation) is typing.Unpack:
            (keys,) = typing.get_args(parameter.annotation)
            found |= keys.__required_keys__ | keys.__optional_keys__
        else:
            found |= set(inspect.signature(overridden).parameters)
    return frozenset(found)


def hinted[T: Callable[..., Any]](target: T) -> T:
    """A function, or a class whose constructor and calls, refuses unknown keywords with a hint."""
    if not isinstance(target, type):
        return _wrapped(target, _names(target, target))
    cls: Any = target
    settings = _names(cls.__init__, super(cls, cls).__init__)
    cls.__init__ = _wrapped(cls.__init__, settings)
    if "__call__" in vars(cls):
        cls.__call__ = _wrapped(cls.__call__, _names(cls.__call__, cls.__call__), settings)
    return cls


def _wrapped(function: Any, known: Collection[str], settings: Collection[str] = ()) -> Any:
    where, known = function.__qualname__, frozenset(known)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not known.issuperset(keywords):
            _refuse(where, known, keywords, settings)
        return function(*arguments, **keywords)

    return call
