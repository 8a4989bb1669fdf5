"""Sign-in with GitHub: members of an organisation or of its teams.

In jupyterhub_config.py, beside this folder, in the place of the lines under "Who"::

    load_subconfig("auth/github.py")

Register an OAuth app of the organisation with https://hub.example/hub/oauth_callback. Its id and
secret are read from GITHUB_CLIENT_ID and GITHUB_CLIENT_SECRET, and tokens are kept encrypted with
JUPYTERHUB_CRYPT_KEY (openssl rand -hex 32): without it, changes count at the next sign-in only.
"""

c = get_config()
c.JupyterHub.authenticator_class = "gpu-members-github"
c.MemberGitHubOAuthenticator.allowed_organizations = {"lab-example:gpu"}  # or the whole of one
c.MemberGitHubOAuthenticator.manage_groups = True  # "lab-example" and "lab-example:gpu"
c.MemberGitHubOAuthenticator.admin_groups = {"lab-example:gpu-admins"}
c.MemberGitHubOAuthenticator.contact = "gpu-admin@lab.example"
