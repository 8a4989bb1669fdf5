"""Sign-in with Google Workspace.

In jupyterhub_config.py, beside this folder, in the place of the lines under "Who"::

    load_subconfig("auth/google.py")

Make an OAuth client with https://hub.example/hub/oauth_callback. Its id and secret are read from
OAUTH_CLIENT_ID and OAUTH_CLIENT_SECRET, and tokens are kept encrypted with JUPYTERHUB_CRYPT_KEY
(openssl rand -hex 32): without it, changes count at the next sign-in only. Google's groups take a
service account too, see OAuthenticator's allowed_google_groups.
"""

c = get_config()
c.JupyterHub.authenticator_class = "gpu-members-google"
c.MemberGoogleOAuthenticator.hosted_domain = ["lab.example"]  # nobody else comes in
c.MemberGoogleOAuthenticator.allowed_mail_domains = {"lab.example"}  # and of these, everybody
c.MemberGoogleOAuthenticator.admin_users = {"grace"}
c.MemberGoogleOAuthenticator.extra_authorize_params = {"access_type": "offline"}
c.MemberGoogleOAuthenticator.contact = "gpu-admin@lab.example"
