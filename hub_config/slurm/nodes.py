"""Servers on several machines, which Slurm schedules. docs/tutorials/a-second-machine.md says what
has to be there. In jupyterhub_config.py, before the last line with add_services:

    load_subconfig("slurm/nodes.py")
"""

import os

c = get_config()

c.JupyterHub.spawner_class = "gpu-slurm"
c.GPUSlurm.cluster_file = os.environ.get("CLUSTER_FILE", "/etc/gpuspawner/cluster.yaml")

# Only root can submit jobs as its members, which Slurm's own fair share and limits need. With
# another user they are all this user's, and have to be allowed to it on every node.
c.GPUSlurm.jobs_of_members = os.geteuid() == 0

# A server is reached by a port of its node, and the Hub by an address of its own machine:
# HUB_BIND_URL is then such as http://10.0.0.1:8081.
c.DockerSpawner.use_internal_ip = False

# The same folder on every machine.
c.GPUDockerSpawner.workspace = "/srv/workspaces/{username}"
