"""What selection is told of an installed FlashAttention, and that it is told without importing it."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxcap
from jaxcap import environment, selection
from jaxcap.spec import AttentionSpec
from jaxcap.torch_bridge import arguments, fa2, fa3, fa4, probe
from jaxcap.torch_bridge.backend import FlashAttention
from tests import conformance, flash_fakes

CPU = ("cpu",)
TRAINED = ("query", "key", "value")


def spec(**changes):
    base = AttentionSpec(
        batch=2,
        query_length=64,
        key_length=64,
        query_heads=4,
        kv_heads=2,
        head_size=64,
        value_size=64,
        dtype="bfloat16",
        scale=0.125,
        softcap=50.0,
        is_causal=True,
        platform="cpu",
    )
    return base.replace(**changes)


@pytest.fixture
def site(tmp_path):
    with flash_fakes.importable(tmp_path):
        yield tmp_path


def reasons(provider, **changes):
    call = spec(**changes)
    return provider.reasons(call, arguments.mask_of(call))


def test_nothing_installed(site):
    for provider in (fa2.FlashAttention2(), *fa3.providers(), fa4.FlashAttention4()):
        assert reasons(provider, platform="sm90") == ["not installed"]


def test_nothing_is_imported_to_find_out():
    """Neither by jaxcap nor by selection, whatever is not installed."""
    code = (
        "import sys, jaxcap, jax\n"
        "q = jax.ShapeDtypeStruct((2, 64, 4, 64), 'bfloat16')\n"
        "print(jaxcap.explain(q, q, q, softcap=50.0, platform='sm90'))\n"
        "assert not {'torch', 'flash_attn', 'cutlass'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "flash_attn_interface: not installed; fa3_fwd_interface: not installed" in run.stdout


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.5.9", "version 2.6.0 or newer, below 3, is needed, found 2.5.9"),
        ("3.0.0", "version 2.6.0 or newer, below 3, is needed, found 3.0.0"),
        ("2.6.0", None),
        ("2.8.3.post2+local", None),
    ],
)
def test_fa2_version(site, version, reason):
    flash_fakes.install_fa2(site, version)
    found = reasons(fa2.FlashAttention2(CPU), gradients=TRAINED)
    assert found == ([] if reason is None else [reason])


def test_fa2_refuses_before_it_is_imported(site):
    """A build without softcap is known by the message that its binary would raise."""
    flash_fakes.install_fa2(site, left_out=("softcap", "backward", "local attention", "alibi"))
    provider = fa2.FlashAttention2(CPU)
    assert reasons(provider) == ["built without softcap"]
    assert reasons(provider, gradients=TRAINED) == [
        "built without softcap",
        "built without a backward",
    ]
    assert reasons(provider, softcap=None, window=(3, 0)) == [
        "built without windows, and this mask is one bottom-right"
    ]
    assert reasons(provider, softcap=None, alibi=True) == ["built without ALiBi"]
    assert "flash_attn_2_cuda" not in sys.modules
    assert reasons(provider, softcap=None) == []
    assert "flash_attn" not in sys.modules  # its extension is enough


def test_fa2_kernels_of_a_partial_build(site):
    flash_fakes.install_fa2(site, sizes=(64, 128, 256))
    provider = fa2.FlashAttention2(CPU)

    def at(size, **changes):
        return reasons(provider, head_size=size, value_size=size, **changes)

    assert [size for size in range(8, 257, 8) if not at(size)] == [
        *(40, 48, 56, 64, 104, 112, 120, 128),
        *(200, 208, 216, 224, 232, 240, 248, 256),
    ]
    assert at(192, dtype="float16") == ["this build has no kernels for float16 and head size 192"]


def test_fa2_rounds_head_sizes_by_version():
    assert fa2.head_sizes((2, 6, 3)) == (32, 64, 96, 128, 160, 192, 224, 256)
    assert fa2.head_sizes((2, 7, 4)) == (32, 64, 96, 128, 160, 192, 256)
    assert fa2.head_sizes((2, 8, 3)) == (32, 64, 96, 128, 192, 256)


def test_fa2_windows_that_its_kernels_widen(site):
    """Of more queries than keys: a right end past all keys, or none beside a left end, is lost."""
    flash_fakes.install_fa2(site)
    provider = fa2.FlashAttention2(CPU)
    lost = ["takes a window for unbounded that reaches further than there are keys"]
    long = {"query_length": 64, "key_length": 16}
    assert reasons(provider, **long) == lost  # causal top-left: right = T - S = 48
    assert reasons(provider, query_length=31, key_length=16) == []
    assert reasons(provider, **long, causal_alignment="bottom_right") == []
    open_end = long | {"is_causal": False, "causal_alignment": "bottom_right"}
    assert reasons(provider, **open_end, window=(3, None)) == lost
    assert reasons(provider, **open_end, window=(3, 2)) == []  # rows without keys are left out
    assert reasons(provider, **open_end, window=(None, 60)) == lost


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi": True, "key_length": 80}, "its ALiBi counts positions from the bottom right"),
        (
            {"alibi": True, "kv_lengths": True, "is_causal": False},
            "its ALiBi counts positions from the end of the length",
        ),
        ({"alibi": True}, None),
        ({"alibi": True, "key_length": 80, "causal_alignment": "bottom_right"}, None),
        ({"kv_lengths": True, "is_causal": False}, None),
    ],
)
def test_fa2_alibi_and_lengths(site, changes, reason):
    flash_fakes.install_fa2(site)
    if (
        "key_length" in changes and reason
    ):  # keys past the queries are left out: bottom-right is top-left
        changes = changes | {"is_causal": False}
    assert reasons(fa2.FlashAttention2(CPU), **changes) == ([] if reason is None else [reason])


def test_fa2_lengths_need_the_present_entry(site):
    flash_fakes.install_fa2(site, "2.6.1")
    found = reasons(fa2.FlashAttention2(CPU), kv_lengths=True, is_causal=False)
    assert found == ["lengths need version 2.6.3, found 2.6.1"]


def test_fa2_faulty_installations(site):
    flash_fakes.install_fa2(site, interface="def flash_attn_func(q, k, v): ...\n")
    assert reasons(fa2.FlashAttention2(CPU)) == [
        "flash_attn_func in flash_attn_interface.py has no parameter softcap"
    ]
    (site / "flash_attn/flash_attn_interface.py").write_text("def (:\n")
    probe.forget()
    [found] = reasons(fa2.FlashAttention2(CPU))
    assert found.startswith("cannot read flash_attn_interface.py")
    (site / "flash_attn_2_cuda.py").unlink()
    probe.forget()
    assert reasons(fa2.FlashAttention2(CPU)) == [
        "version 2.8.3 is installed without its kernels, flash_attn_2_cuda"
    ]


def test_import_errors_are_reasons_and_asked_once(site):
    """A library that does not fit this PyTorch is found out when all else is in order, not before."""
    flash_fakes.install_fa2(site)
    module = """
import pathlib
with pathlib.Path(__file__).with_name("count").open("a") as file:
    file.write("x")
raise OSError("undefined symbol: c10")
"""
    (site / "flash_attn_2_cuda.py").write_text(module)
    provider = fa2.FlashAttention2(CPU)
    assert reasons(provider, platform="sm90") == ["is for cpu, this call runs on sm90"]
    assert not (site / "count").exists()
    for _ in range(3):
        assert reasons(provider) == [
            "importing flash_attn_2_cuda fails: OSError('undefined symbol: c10')"
        ]
    assert (site / "count").read_text() == "x"


FA3 = fa3.FlashAttention3(CPU)
FA3_FWD = fa3.FlashAttention3(CPU, interface="fa3_fwd_interface", config="fa3_fwd_config")


@pytest.mark.parametrize(
    ("without", "changes", "reason"),
    [
        ((), {"gradients": TRAINED}, None),
        (("SOFTCAP",), {}, "built without softcap"),
        (("SOFTCAP",), {"softcap": None}, None),
        (("BACKWARD",), {"gradients": TRAINED}, "built without a backward"),
        (("BACKWARD",), {}, None),
        (("LOCAL",), {"window": (3, 0)}, "built without windows"),
        (("LOCAL",), {"query_length": 80}, "built without windows"),
        (("LOCAL",), {"key_length": 80}, None),
        (("FP16",), {"dtype": "float16"}, "built without float16"),
        (("VARLEN",), {"kv_lengths": True, "is_causal": False}, "built without variable lengths"),
        (
            ("HDIM256",),
            {"head_size": 256, "value_size": 256},
            "this build has head sizes up to 192",
        ),
        (("HDIM96",), {"head_size": 96, "value_size": 96}, None),
        ((), {"alibi": True}, "has no ALiBi"),
        (
            (),
            {
                "head_size": 256,
                "value_size": 256,
                "deterministic": True,
                "gradients": TRAINED,
            },
            "no deterministic backward at head sizes above 192",
        ),
    ],
)
def test_fa3_build_flags(site, without, changes, reason):
    flash_fakes.install_fa3(site, without=without)
    found = reasons(FA3, **changes)
    assert found == [] if reason is None else (len(found) == 1 and found[0].startswith(reason))


@pytest.mark.parametrize(
    "entry", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
)
def test_fa3_signatures(site, entry):
    """softcap has to be on each of the three entry points."""
    head, name, rest = flash_fakes._FA3_INTERFACE.partition(f"def {entry}(")
    flash_fakes.install_fa3(site, interface=head + name + rest.replace("softcap=0.0,", "", 1))
    assert reasons(FA3) == [f"{entry} in flash_attn_interface.py has no parameter softcap"]


def test_fa3_without_word_of_its_build(site):
    flash_fakes.install_fa3(site)
    (site / "flash_attn_config.py").unlink()
    [found] = reasons(FA3)
    assert found == "has no flash_attn_config, so what it was built with is not known"
    probe.forget()
    flash_fakes.install_fa3(site, flags={"FLASHATTENTION_DISABLE_SOFTCAP": False})
    [found] = reasons(FA3)
    assert found.startswith("flash_attn_config does not say whether it has BACKWARD")
    for text in ("CONFIG = compute()\n", "OTHER = 1\n", "CONFIG = {}\n"):
        (site / "flash_attn_config.py").write_text(text)
        probe.forget()
        [found] = reasons(FA3)
        assert "build flags" in found


def test_fa3_platforms(site):
    provider = fa3.FlashAttention3()
    flash_fakes.install_fa3(site, without=("SM8x",))
    assert reasons(provider, platform="sm80") == ["is for sm90, this call runs on sm80"]
    assert reasons(provider, platform="sm90") == ["PyTorch sees no GPU"]
    probe.forget()
    flash_fakes.install_fa3(site)
    assert reasons(provider, platform="sm80") == ["PyTorch sees no GPU"]
    assert "this call runs on sm100" in reasons(provider, platform="sm100")[0]


def test_fa3_each_module_has_its_own_abilities(site):
    """As `tokenspeed-fa3` and `fa3-fwd` are built; whichever can serves, and one can be pinned."""
    flash_fakes.install_fa3(site, without=("BACKWARD", "SOFTCAP", "HDIM96", "SM8x"))
    flash_fakes.install_fa3(site, "fa3_fwd", without=("BACKWARD", "LOCAL", "FP16"))
    both = FlashAttention("fa3", (FA3, FA3_FWD))
    assert both.provider(spec()) is FA3_FWD
    assert both.provider(spec(softcap=None, window=(3, 0))) is FA3
    assert both.provider(spec(softcap=None, dtype="float16")) is FA3
    assert both.reasons(spec(window=(3, 0))) == [
        "flash_attn_interface: built without softcap",
        "fa3_fwd_interface: built without windows, and this mask is one bottom-right",
    ]
    pinned = "fa3_fwd_interface"
    one = FlashAttention("fa3", tuple(fa3.FlashAttention3(CPU, pinned=pinned, **names) for names in (
        {}, {"interface": "fa3_fwd_interface", "config": "fa3_fwd_config"})))  # fmt: skip
    assert one.provider(spec(softcap=None)).title == pinned
    assert one.reasons(spec(softcap=None, window=(3, 0)))[0] == (
        "flash_attn_interface: JAXCAP_FA3_PROVIDER=fa3_fwd_interface excludes it"
    )
    with pytest.raises(jaxcap.BackendError, match="built without a backward"):
        both.provider(spec(gradients=TRAINED))


def test_fa3_provider_variable():
    read = environment.Environment.read
    assert read({}).fa3_provider is None
    assert read({"JAXCAP_FA3_PROVIDER": "fa3_fwd_interface"}).fa3_provider == "fa3_fwd_interface"
    with pytest.raises(ValueError, match="JAXCAP_FA3_PROVIDER must be one of flash_attn_interface"):
        read({"JAXCAP_FA3_PROVIDER": "tokenspeed"})


def test_fa3_unknown_operators(site):
    flash_fakes.install_fa3(site)
    path = site / "flash_attn_interface.py"
    path.write_text(path.read_text().replace("flash_attn_3_gpu", "something_else"))
    [found] = reasons(FA3)
    assert found.startswith("flash_attn_interface has none of flash_attn_3_gpu")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("4.0.0b35", "version 4.0.0b36 or newer is needed, found 4.0.0b35"),
        ("5.0.0", "version 4.0.0b36 or newer is needed, found 5.0.0"),
        ("4.0.0b36", None),
        ("4.0.0", None),
        ("4.1.0b1", None),
    ],
)
def test_fa4_version(site, version, reason):
    flash_fakes.install_fa4(site, version)
    found = reasons(fa4.FlashAttention4(CPU), gradients=TRAINED)
    assert found == ([] if reason is None else [reason])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "sm80"}, None),
        ({"platform": "sm80", "gradients": TRAINED}, "no backward on sm80"),
        ({"platform": "sm90", "gradients": TRAINED, "head_size": 256, "value_size": 256}, None),
        ({"platform": "sm100", "gradients": TRAINED}, None),
        (
            {"platform": "sm100", "head_size": 256, "value_size": 256},
            "head size 256 is not complete on sm100",
        ),
        ({"platform": "sm120", "gradients": TRAINED}, "no backward with a softcap on sm120"),
        ({"platform": "sm120", "gradients": TRAINED, "softcap": None}, None),
        (
            {"platform": "sm120", "gradients": TRAINED, "softcap": None, "deterministic": True},
            "no deterministic backward on sm120",
        ),
        ({"platform": "sm90", "alibi": True}, "has no ALiBi"),
        ({"platform": "sm75"}, "is for sm80, sm86"),
    ],
)
def test_fa4_architectures(site, changes, reason):
    flash_fakes.install_fa4(site)
    [found] = reasons(fa4.FlashAttention4(), **changes)
    assert found.startswith("PyTorch sees no GPU" if reason is None else reason)


def test_fa4_faulty_installations(site):
    flash_fakes.install_fa4(site, dsl=False)
    provider = fa4.FlashAttention4(CPU)
    assert reasons(provider) == ["needs nvidia-cutlass-dsl, which is not installed"]
    probe.forget()
    older = flash_fakes._FA4_INTERFACE.replace("seqused_k=None,", "")
    flash_fakes.install_fa4(site, interface=older)
    [found] = reasons(provider)
    assert found == "_flash_attn_fwd in interface.py has no parameter seqused_k"
    (site / "flash_attn/cute/interface.py").unlink()
    probe.forget()
    assert reasons(provider) == ["version 4.0.0b36 is hidden by another package named flash_attn"]


def test_value_size_of_its_own_and_dropout_in_explain(site):
    """In training with dropout every FlashAttention is refused; the rate 0 of evaluation is none."""
    flash_fakes.install_fa2(site)
    backend = FlashAttention("fa2", (fa2.FlashAttention2(CPU),))
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    with conformance.registered(backend):
        rng = jax.random.key(0)
        found = jaxcap.explain(q, q, q, softcap=50.0, dropout_rate=0.1, dropout_rng=rng)
        assert "cannot drop the entries that the key names" in found.training.reasons["fa2"]
        evaluated = jaxcap.explain(q, q, q, softcap=50.0, dropout_rate=0.0, dropout_rng=rng)
        assert evaluated.training.reasons["fa2"] == ()
        assert evaluated.forward.backend == "fa2"


def test_steered_off_and_preference(site, monkeypatch):
    flash_fakes.install_fa2(site)
    flash_fakes.install_fa3(site)
    backends = (
        FlashAttention("fa2", (fa2.FlashAttention2(CPU),)),
        FlashAttention("fa3", (FA3,)),
    )
    with conformance.registered(*backends):
        assert selection.decide(spec(gradients=TRAINED)).backend == "fa3"
        off = environment.Environment.read({"JAXCAP_FLASH_ATTN_V3": "0"})
        monkeypatch.setattr(selection, "ENVIRONMENT", off)
        decision = selection.decide(spec(gradients=TRAINED))
        assert decision.backend == "fa2"
        assert decision.reasons["fa3"] == ("switched off by JAXCAP_FLASH_ATTN_V3=0",)


def test_table_of_features_does_not_depend_on_what_is_installed(site):
    for name, module in (("fa2", fa2), ("fa3", fa3), ("fa4", fa4)):
        backend = module.BACKEND
        assert backend.name == name
        assert backend.reasons(spec(platform="sm90"))
        assert backend.full_build.reasons(spec(platform="sm90", gradients=TRAINED)) == []
        assert backend.full_build.reasons(spec(platform="sm90", bias_shape=(1, 1, 64, 64)))
