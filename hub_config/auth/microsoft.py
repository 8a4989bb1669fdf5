"""Sign-in with Microsoft Entra ID (once Azure AD).

In jupyterhub_config.py, beside this folder, in the place of the lines under "Who"::

    load_subconfig("auth/microsoft.py")

Register an app for accounts of your organisation only, with
https://hub.example/hub/oauth_callback, and add the groups claim to its id token. Tenant, id and
secret are read from AAD_TENANT_ID, OAUTH_CLIENT_ID and OAUTH_CLIENT_SECRET, and tokens are kept
encrypted with JUPYTERHUB_CRYPT_KEY (openssl rand -hex 32): without it, changes count at the next
sign-in only.
"""

c = get_config()
c.JupyterHub.authenticator_class = "gpu-members-microsoft"
# For the usernames of a hub that used AzureAdOAuthenticator, and not the ones people sign in with:
# c.MemberMicrosoftOAuthenticator.username_claim = "name"
c.MemberMicrosoftOAuthenticator.manage_groups = True
c.MemberMicrosoftOAuthenticator.group_names = {  # the ids of Entra's groups; no others
    "4f1c2a7e-3b0e-4f5d-9a51-0e2f6c1d7b90": "gpu-members",
    "9b7d7c55-9f0c-4c39-8a27-6c1f0a3f2f11": "gpu-admins",
    "*": "",
}
c.MemberMicrosoftOAuthenticator.allowed_groups = {"gpu-members"}
c.MemberMicrosoftOAuthenticator.admin_groups = {"gpu-admins"}
c.MemberMicrosoftOAuthenticator.contact = "gpu-admin@lab.example"
