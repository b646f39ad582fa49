"""The proxies that are compared."""

from benchmarks.proxy.others import (
    LITELLM,
    TENSORZERO,
    TRINITY,
    VLLM_ROUTER,
    litellm,
    tensorzero,
    trinity,
    vllm_router,
)
from benchmarks.proxy.systems import Kind, direct, nginx, tuneloop

KINDS = (
    Kind(name="direct", start=direct),
    Kind(name="nginx", start=nginx),
    Kind(name=f"vllm-router {VLLM_ROUTER}", start=vllm_router),
    Kind(
        name=f"TensorZero {TENSORZERO}, PostgreSQL, in batches",
        start=tensorzero,
        postgres=True,
        options={"batches": True},
    ),
    Kind(name=f"TensorZero {TENSORZERO}, PostgreSQL, as it comes", start=tensorzero, postgres=True),
    Kind(name=f"TensorZero {TENSORZERO}, recording nothing", start=tensorzero),
    Kind(name="tuneloop, SQLite", start=tuneloop),
    Kind(name="tuneloop, PostgreSQL", start=tuneloop, postgres=True),
    Kind(name=f"trinity-rft {TRINITY}, SQLite", start=trinity),
    Kind(name=f"trinity-rft {TRINITY}, PostgreSQL", start=trinity, postgres=True),
    Kind(name=f"LiteLLM {LITELLM}, recording nothing", start=litellm),
)
