"""Real vLLM as the engine of a real run, with our Batcher and policy in its scheduler's place.

`EngineWorkers` is to `runtime.serve` what other workers are. Importing the package imports no vLLM.
Of vLLM it is written for one version, `VERSION`: some of what it uses is not public.
"""

from runtime.vllm.settings import VERSION, EngineSettings, require_vllm
from runtime.vllm.workers import EngineWorkers

__all__ = ["VERSION", "EngineSettings", "EngineWorkers", "require_vllm"]
