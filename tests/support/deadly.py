"""For the configuration of a hub that dies while it gives a warm container to its member."""

from __future__ import annotations

DEADLY = """
import os
from docker import APIClient
from gpuspawner.engines import warm
from gpuspawner.engines.attached import Channel
from gpuspawner.engines.mounting import Mounter

def deadly(of, name, step, begins=""):
    done = getattr(of, name)
    def then_die(*args, **kwargs):
        result = done(*args, **kwargs)
        wanted = os.path.exists(ARMED) and open(ARMED).read() == step
        if wanted and str(args[-1]).startswith(begins):
            os.remove(ARMED)
            os.kill(os.getpid(), 9)
        return result
    setattr(of, name, then_die)

deadly(warm, "_note_given", "noted")
deadly(APIClient, "rename", "renamed")
deadly(Mounter, "mount", "mounted")
deadly(Channel, "say", "told", begins="{")  # not what the mounter is told
"""
"""A hub that dies once, right after a step of giving that the file ARMED names."""
