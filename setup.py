"""`EVENFLOW_COMPILE=1 pip install .` compiles the modules of the hot loop with mypyc."""

import gc
import os
import sys

from setuptools import setup

HOT = """
evenflow/core/batch.py evenflow/core/batcher.py evenflow/core/decodes.py evenflow/core/kv.py
evenflow/core/loop.py evenflow/core/queues.py evenflow/core/scheduling.py evenflow/costs/base.py
evenflow/results/recorder.py evenflow/schedulers/admission.py
evenflow/schedulers/limits.py evenflow/schedulers/reserving.py evenflow/schedulers/sarathi.py
evenflow/schedulers/td_pipe.py evenflow/schedulers/token_throttling.py evenflow/schedulers/vllm.py
evenflow/core/scheduling.py evenflow/sim/arrivals.py evenflow/sim/clock.py evenflow/sim/driver.py
evenflow/sim/stages.py evenflow/sim/tandem.py
"""

options: dict[str, list[object]] = {}
if os.environ.get("EVENFLOW_COMPILE") == "1":
    options["setup_requires"] = ["mypy>=2,<3", "numpy", "pydantic", "simpy"]  # whose types it reads
    if not {"egg_info", "dist_info"}.intersection(sys.argv):  # which only ask for names
        from mypyc.build import mypycify

        level = os.environ.get("MYPYC_OPT_LEVEL", "3")
        options["ext_modules"] = mypycify(HOT.split(), opt_level=level)
        gc.freeze()  # to collect mypy's trees as the process ends takes as long as to check types
setup(**options)
