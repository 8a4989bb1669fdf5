"""The configuration file that jupyterhub-idle-culler is started with."""

from __future__ import annotations

from gpuspawner.service.idle_culler import cull_arbiter

if read := globals().get("get_config"):  # only defined when read as a configuration
    read().IdleCuller.cull_arbiter_hook = cull_arbiter
