"""`EVENFLOW_COMPILE=1 pip install .` compiles the modules of the hot loop with mypyc."""

import os

from setuptools import setup

HOT = """
evenflow/batch.py evenflow/batcher.py evenflow/costs/base.py evenflow/decodes.py evenflow/kv.py
evenflow/loop.py evenflow/queues.py evenflow/radix.py evenflow/results/recorder.py
evenflow/schedulers/admission.py evenflow/schedulers/limits.py evenflow/schedulers/orca.py
evenflow/schedulers/reserving.py evenflow/schedulers/sarathi.py evenflow/schedulers/static.py
evenflow/schedulers/td_pipe.py evenflow/schedulers/token_throttling.py
evenflow/schedulers/token_throttling_code.py evenflow/schedulers/token_throttling_rules.py
evenflow/schedulers/vllm.py evenflow/schedulers/vllm_balanced.py
evenflow/schedulers/vllm_priority.py evenflow/schedulers/vllm_v1.py evenflow/scheduling.py
sim/clock.py sim/driver.py sim/stages.py sim/tandem.py
"""

options: dict[str, list[object]] = {}
if os.environ.get("EVENFLOW_COMPILE") == "1":
    options["setup_requires"] = ["mypy>=2,<3", "numpy", "pydantic", "simpy"]  # whose types it reads
    try:
        from mypyc.build import mypycify
    except ImportError:  # pip asks for setup_requires, and then comes again
        pass
    else:
        options["ext_modules"] = mypycify(HOT.split(), opt_level="3")
setup(**options)
