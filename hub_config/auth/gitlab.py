"""Sign-in with GitLab: members of a group or a project.

In jupyterhub_config.py, beside this folder, in the place of the lines under "Who"::

    load_subconfig("auth/gitlab.py")

Register an application of the group, with https://hub.example/hub/oauth_callback and the scopes
read_api and openid. Its id and secret are read from GITLAB_CLIENT_ID and GITLAB_CLIENT_SECRET,
and tokens are kept encrypted with JUPYTERHUB_CRYPT_KEY (openssl rand -hex 32): without it,
changes count at the next sign-in only.
"""

c = get_config()
c.JupyterHub.authenticator_class = "gpu-members-gitlab"
c.MemberGitLabOAuthenticator.gitlab_url = "https://gitlab.com"  # or your own
c.MemberGitLabOAuthenticator.allowed_gitlab_groups = {"lab-example/gpu"}
c.MemberGitLabOAuthenticator.manage_groups = True  # by their paths: "lab-example/gpu"
c.MemberGitLabOAuthenticator.admin_groups = {"lab-example/gpu-admins"}
c.MemberGitLabOAuthenticator.contact = "gpu-admin@lab.example"
