"""With EVENFLOW_COMPILE=1, which build_backend.py sets, mypyc compiles the modules of the loop."""

import gc
import gzip
import os
import sys
import tarfile

from setuptools import setup
from setuptools.command.sdist import sdist

HOT = """
evenflow/core/batch.py evenflow/core/batcher.py evenflow/core/decodes.py evenflow/core/kv.py
evenflow/core/loop.py evenflow/core/queues.py evenflow/core/scheduling.py evenflow/costs/base.py
evenflow/costs/roofline.py evenflow/engines/ahead.py evenflow/engines/append_only.py
evenflow/engines/lock_step.py evenflow/engines/loop.py evenflow/engines/queues.py
evenflow/engines/radix.py evenflow/engines/speculation.py evenflow/engines/swap.py
evenflow/engines/upkeep.py evenflow/engines/view.py
evenflow/results/recorder.py evenflow/schedulers/admission.py
evenflow/schedulers/limits.py evenflow/schedulers/reserving.py evenflow/schedulers/sarathi.py
evenflow/schedulers/sglang.py evenflow/schedulers/td_pipe.py
evenflow/schedulers/token_throttling.py evenflow/schedulers/trtllm.py evenflow/schedulers/vllm.py
evenflow/sim/arrivals.py evenflow/sim/clock.py evenflow/sim/coast.py evenflow/sim/driver.py
evenflow/sim/engine_coast.py evenflow/sim/stages.py evenflow/sim/tandem.py evenflow/study/early.py
"""


class Sdist(sdist):
    """A source distribution whose bytes are those of its files only, if SOURCE_DATE_EPOCH is set.

    As of a wheel: no time, owner or mask of the machine that builds it is in it.
    """

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **owner):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **owner)

        def plain(member):
            member.mtime, member.mode = int(epoch), 0o755 if member.mode & 0o100 else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member

        path = f"{base_name}.tar.gz"
        self.mkpath(os.path.dirname(path))
        with (
            gzip.GzipFile(path, "wb", mtime=int(epoch)) as file,
            tarfile.open(fileobj=file, mode="w") as tar,
        ):
            tar.add(base_dir, filter=plain)
        return path


options: dict[str, object] = {"cmdclass": {"sdist": Sdist}}
only_names = {"egg_info", "dist_info"}.intersection(sys.argv)
if os.environ.get("EVENFLOW_COMPILE") == "1" and not only_names:
    from mypyc.build import mypycify

    level = os.environ.get("MYPYC_OPT_LEVEL", "1")
    options["ext_modules"] = mypycify(
        ["--config-file=mypyc.ini", *HOT.split()], opt_level=level, debug_level="0"
    )
    gc.freeze()  # to collect mypy's trees as the process ends takes as long as to check types
setup(**options)
