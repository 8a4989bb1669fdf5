"""Sign-in with the account of a university or lab, through CILogon.

In jupyterhub_config.py, beside this folder, in the place of the lines under "Who"::

    load_subconfig("auth/cilogon.py")

Register a client with https://hub.example/hub/oauth_callback. Its id and secret are read from
CILOGON_CLIENT_ID and CILOGON_CLIENT_SECRET, and tokens are kept encrypted with
JUPYTERHUB_CRYPT_KEY (openssl rand -hex 32): without it, changes count at the next sign-in only.
"""

c = get_config()
c.JupyterHub.authenticator_class = "gpu-members-cilogon"
c.MemberCILogonOAuthenticator.idps = {
    "https://idp.lab.example/shibboleth": {
        "username_derivation": {
            "username_claim": "eppn",
            "action": "strip_idp_domain",
            "domain": "lab.example",
        },
        "allowed_domains": ["lab.example"],
    },
}
c.MemberCILogonOAuthenticator.other_account = "https://cilogon.org/logout"
c.MemberCILogonOAuthenticator.contact = "gpu-admin@lab.example"
