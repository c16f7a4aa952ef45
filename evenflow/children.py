"""Child processes: none outlives its parent, nor do files that the parent left for it.

Nothing that one of them waits for may hold it when the other is killed.
"""

from __future__ import annotations

import os
import shutil
import threading
from multiprocessing import parent_process


def end_with_parent(folder: str = "") -> None:
    """Watch the parent from a thread; when it is gone, remove its `folder` and end this process.

    In a process that no other started it does nothing.
    """
    parent = parent_process()

    def watch() -> None:
        assert parent is not None
        parent.join()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, name="watch", daemon=True).start()


def meeting(folder: str) -> str:
    """Return the path of a file in `folder` by which torch's processes find each other.

    It is open already. For a file of a folder that has gone, torch waits five minutes and holds the
    GIL. OSError when the folder is gone.
    """
    return f"/dev/fd/{os.open(f'{folder}/meeting', os.O_RDWR | os.O_CREAT)}"
