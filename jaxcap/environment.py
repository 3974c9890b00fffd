"""The environment variables, read once at import, and the log they steer."""

import dataclasses
import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("jaxcap")

#: Modules that FlashAttention 3 comes as.
FA3_PROVIDERS = ("flash_attn_interface", "fa3_fwd_interface")

_SWITCHES = {"1": True, "true": True, "0": False, "false": False}


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    value = env.get(name, "")
    if not value:
        return default
    if value.lower() not in _SWITCHES:
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return _SWITCHES[value.lower()]


@dataclasses.dataclass(frozen=True)
class Environment:
    backend: str | None = None  # JAXCAP_BACKEND: as `implementation` on every call
    steered_off: tuple[str, ...] = ()  # FlashAttention backends switched off by their variable
    deterministic: bool = False  # JAXCAP_DETERMINISTIC: default of the argument
    fa3_provider: str | None = None  # JAXCAP_FA3_PROVIDER: the one of FA3_PROVIDERS to use
    log: str | None = None  # JAXCAP_LOG: "info" (what ran) or "debug" (and why not the others)

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Environment":
        log = env.get("JAXCAP_LOG", "").lower() or None
        if log not in (None, "info", "debug"):
            raise ValueError(f"JAXCAP_LOG must be 'info' or 'debug', got {env['JAXCAP_LOG']!r}")
        provider = env.get("JAXCAP_FA3_PROVIDER") or None
        if provider not in (None, *FA3_PROVIDERS):
            raise ValueError(
                f"JAXCAP_FA3_PROVIDER must be one of {', '.join(FA3_PROVIDERS)}, got {provider!r}"
            )
        off = tuple(
            f"fa{n}" for n in (2, 3, 4) if not _switch(env, f"JAXCAP_FLASH_ATTN_V{n}", True)
        )
        return cls(
            backend=env.get("JAXCAP_BACKEND") or None,
            steered_off=off,
            deterministic=_switch(env, "JAXCAP_DETERMINISTIC", False),
            fa3_provider=provider,
            log=log,
        )


ENVIRONMENT = Environment.read(os.environ)

if ENVIRONMENT.log is not None:
    logger.setLevel(ENVIRONMENT.log.upper())
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False
