"""`attn_implementation="jaxcap"`: Gemma 2 with random weights beside Transformers' own eager attention."""

import types

import numpy as np
import pytest
import torch

from jaxcap import torch_bridge
from jaxcap.torch_bridge import huggingface
from tests.torch_reference import far, numpy

transformers = pytest.importorskip("transformers")
torch_bridge.register_with_transformers()

CAP = 2.0
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": CAP,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LENGTH, PAD = 24, 9
MASKS = {
    "no padding": None,
    "right": torch.tensor([[1] * LENGTH, [1] * (LENGTH - PAD) + [0] * PAD]),
    "left": torch.tensor([[1] * LENGTH, [0] * PAD + [1] * (LENGTH - PAD)]),
}


def model(implementation, device="cpu", dtype=torch.float32, **shape):
    """Weights whose logits reach the cap."""
    torch.manual_seed(1)
    config = transformers.Gemma2Config(**(SHAPE | shape))
    made = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for x in made.parameters():
            x.mul_(4 if x.dim() > 1 else 1)
    return made.to(device=device, dtype=dtype).eval()


def tokens(device="cpu"):
    ids = torch.randint(1, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return ids.to(device)


def results(net, mask) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of the tokens that are there, and the gradients of all weights."""
    device = next(net.parameters()).device
    ids = tokens(device)
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(device).bool()
    net.zero_grad()
    logits = net(ids, attention_mask=None if mask is None else mask.to(device)).logits[keep]
    torch.nn.functional.cross_entropy(logits.float(), ids[keep]).backward()
    return numpy(logits), [numpy(x.grad) for x in net.parameters()]


def distance(found, wanted) -> list[float]:
    pairs = zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True)
    return [far(torch.from_numpy(a), b) for a, b in pairs]


@pytest.mark.parametrize("padding", list(MASKS))
def test_logits_and_gradients_are_eager_s(padding):
    wanted = results(model("eager"), MASKS[padding])
    found = results(model("jaxcap"), MASKS[padding])
    assert max(distance(found, wanted)) < 2e-5


def compare_to_eager(device, dtype, **shape):
    """In 16 bits: no further from float32 than twice what eager attention is in the same precision."""
    mask = MASKS["left"]
    wanted = results(model("eager", device, **shape), mask)
    eager = distance(results(model("eager", device, dtype, **shape), mask), wanted)
    ours = distance(results(model("jaxcap", device, dtype, **shape), mask), wanted)
    assert ours[0] <= 2 * eager[0] and np.mean(ours) <= 2 * np.mean(eager)


@pytest.mark.parametrize("padding", ["no padding", "left"])
def test_generation_with_a_cache_is_eager_s(padding):
    ids, mask = tokens(), MASKS[padding]
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    wanted = model("eager").generate(ids, **options)
    assert torch.equal(model("jaxcap").generate(ids, **options), wanted)
    static = model("jaxcap").generate(
        ids, cache_implementation="static", disable_compile=True, **options
    )
    assert torch.equal(static, wanted)


def test_the_cap_and_the_window_reach_the_kernel(monkeypatch):
    seen = []
    attend = huggingface.attend
    monkeypatch.setattr(
        huggingface, "attend", lambda s, t, *a: seen.append((s, t)) or attend(s, t, *a)
    )
    net = model("jaxcap")
    with torch.no_grad():
        capped = net(tokens()).logits
    assert [s.softcap for s, _ in seen] == [CAP] * 4
    assert [s.window_size for s, _ in seen] == [(7, -1), (-1, -1)] * 2
    assert all(s.causal and s.scale == 24**-0.5 for s, _ in seen)
    assert all(t.mask is None and t.key.shape[2] == 2 for _, t in seen)
    # The same weights without a cap give something else.
    other = model("jaxcap", attn_logit_softcapping=None)
    with torch.no_grad():
        assert far(other(tokens()).logits, numpy(capped)) > 1e-2


def test_lengths_share_kernels(monkeypatch):
    shapes = set()
    attend = huggingface.attend
    monkeypatch.setattr(
        huggingface, "attend", lambda s, t, *a: shapes.add(t.key.shape) or attend(s, t, *a)
    )
    net = model("jaxcap")
    with torch.no_grad():
        for length in (17, 20, 24):
            net(tokens()[:, :length])
    assert len(shapes) == 1


def layer(**attributes):
    config = types.SimpleNamespace(attn_logit_softcapping=None)
    return types.SimpleNamespace(**({"config": config, "is_causal": True} | attributes))


def states(t=6, s=6):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, n, length, 16, generator=generator) for n, length in ((4, t), (2, s), (2, s))
    ]


def test_a_cap_that_a_model_keeps_to_itself_is_an_error():
    config = types.SimpleNamespace(attn_logit_softcapping=50.0)
    with pytest.raises(ValueError, match="the cap would be dropped"):
        huggingface.attention_forward(layer(config=config), *states(), None)
    with pytest.raises(ValueError, match="jaxcap has no output_attentions"):
        huggingface.attention_forward(layer(), *states(), None, output_attentions=True)


@pytest.mark.parametrize("t", [6, 1])
def test_masks_of_a_model_s_own(t):
    """Boolean and additive masks, a position bias and sinks mean what they do in eager attention."""
    q, k, v = states(t)
    kept = torch.rand(1, 1, t, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    kept[..., 0] = True
    bias = torch.randn(1, 4, t, 6, generator=torch.Generator().manual_seed(2))
    sinks = torch.randn(4)
    scores = q @ k.repeat_interleave(2, 1).mT / 4 + bias
    scores = scores.masked_fill(~kept, -torch.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, t, 1)], -1)
    wanted = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    call = huggingface.attention_forward
    out, _ = call(layer(), q, k, v, kept, position_bias=bias, s_aux=sinks, scaling=0.25)
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    additive = torch.where(kept, 0.0, torch.finfo(torch.float32).min)
    out, _ = call(layer(), q, k, v, additive, position_bias=bias, s_aux=sinks, scaling=0.25)
    torch.testing.assert_close(out.transpose(1, 2), wanted)


def test_the_newest_token_sees_its_window():
    q, k, v = states(1, 30)
    padding = torch.arange(30)[None] > 3
    out, _ = huggingface.attention_forward(layer(), q, k, v, padding, sliding_window=5)
    wanted, _ = huggingface.attention_forward(layer(), q, k[:, :, -5:], v[:, :, -5:], None)
    torch.testing.assert_close(out, wanted)


def test_masks_that_are_more_than_causality_and_a_window_are_written_out():
    from transformers import masking_utils

    sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8, "device": "cpu"}
    config = types.SimpleNamespace(sliding_window=3, attention_chunk_size=None)

    def mask(function, **keywords):
        return huggingface.attention_mask(**sizes, mask_function=function, **keywords)

    causal = masking_utils.causal_mask_function
    sliding = masking_utils.sliding_window_causal_mask_function(3)
    assert mask(causal).shape == (0, 8, 9)
    assert mask(sliding, local_size=3, config=config).shape == (0, 8, 12)
    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int32))
    config.attention_chunk_size = 3
    written = mask(chunked, local_size=3, config=config)
    assert written.shape == (1, 1, 8, 8) and not written[0, 0, 3, 2] and written[0, 0, 2, 1]
    other = masking_utils.and_masks(causal, lambda b, h, q, k: k != 2)
    assert not mask(other)[0, 0, 5, 2]
    assert mask(causal, allow_is_causal_skip=False).shape == (1, 1, 8, 8)
    # A static cache is longer than what it holds.
    assert mask(causal, q_offset=torch.tensor(0)).shape == (1, 1, 8, 8)
    padding = torch.tensor([[False, True, True, True, True, True, True, True]])
    assert mask(causal, attention_mask=padding).shape == (1, 8, 9)
    config.attention_chunk_size = None
    windowed = mask(sliding, attention_mask=padding, local_size=3, config=config)
    assert windowed.shape == (1, 8, 12) and windowed.stride(2) == 0


def test_what_a_model_does_to_a_mask_or_its_keys_is_noticed():
    """It would lose causality or a window, or see keys of its own, silently."""
    from transformers import masking_utils

    sizes = {"batch_size": 1, "q_length": 6, "kv_length": 6, "device": "cpu"}
    sizes |= {"mask_function": masking_utils.causal_mask_function}
    short = huggingface.attention_mask(**sizes)
    given = states()
    # Whatever the module says of itself: Transformers made the mask a causal one.
    found, _ = huggingface.attention_forward(layer(is_causal=False), *given, short)
    torch.testing.assert_close(found, huggingface.attention_forward(layer(), *given, None)[0])
    with pytest.raises(IndexError):  # to add to it, as `doge` does; which gets all of it
        short[:, :, :, :6]
    config = types.SimpleNamespace(model_type="doge", sliding_window=None)
    assert huggingface.attention_mask(config=config, **sizes).shape == (1, 1, 6, 6)
    for changed in (short[..., :6], short[:, :5]):
        with pytest.raises(ValueError, match="changed since.*attn_implementation='eager'"):
            huggingface.attention_forward(layer(), *given, changed)
    with pytest.raises(ValueError, match="attends 8 keys under a causal mask made for 6"):
        huggingface.attention_forward(layer(), *states(6, 8), short)
    with pytest.raises(
        ValueError, match="hands sinks to its attention, which jaxcap does not know"
    ):
        huggingface.attention_forward(layer(), *given, short, sinks=torch.zeros(1, 4, 6, 1))


@pytest.mark.parametrize("padding", ["no padding", "left"])
def test_a_window_that_the_module_keeps_to_itself_is_in_the_mask(padding):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(
        "phimoe", sliding_window=4, max_position_embeddings=64, **sizes, **heads, **special
    )
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    mask = MASKS[padding]
    keep = torch.ones_like(tokens()) if mask is None else mask
    found = {}
    for name in ("eager", "jaxcap"):
        net.set_attn_implementation(name)
        with torch.no_grad():
            logits = net(tokens(), attention_mask=mask).logits[keep.bool()]
            cached = net.generate(
                tokens(), attention_mask=keep, max_new_tokens=3, min_new_tokens=3, do_sample=False
            )
        found[name] = logits, cached
    torch.testing.assert_close(found["jaxcap"][0], found["eager"][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found["jaxcap"][1], found["eager"][1])
