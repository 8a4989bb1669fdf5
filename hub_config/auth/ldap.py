"""Sign-in with the name and password of a directory, such as OpenLDAP.

In jupyterhub_config.py, beside this folder, in the place of the lines under "Who"::

    load_subconfig("auth/ldap.py")

It needs ``pip install "gpuspawner[ldap]"``. The directory is asked again for members who are
signed in, by an account of its own that may read people and groups and nothing else. What is
said here of FreeIPA and Active Directory was not tried.
"""

import os

c = get_config()
c.JupyterHub.authenticator_class = "gpu-members-ldap"
c.MemberLDAPAuthenticator.server_address = "ldap.lab.example"
c.MemberLDAPAuthenticator.tls_kwargs = {}  # {"ca_certs_file": "..."} for a CA of your own

# Whose passwords, and who looks people up (FreeIPA: uid=hub,cn=sysaccounts,cn=etc,dc=...).
c.MemberLDAPAuthenticator.lookup_dn = True
c.MemberLDAPAuthenticator.lookup_dn_search_user = "cn=hub,dc=lab,dc=example"
c.MemberLDAPAuthenticator.lookup_dn_search_password = os.environ["LDAP_PASSWORD"]
c.MemberLDAPAuthenticator.user_search_base = "ou=people,dc=lab,dc=example"
c.MemberLDAPAuthenticator.user_attribute = "uid"  # Active Directory: sAMAccountName
c.MemberLDAPAuthenticator.lookup_dn_user_dn_attribute = "uid"  # and here

# The directory's groups become the hub's.
c.MemberLDAPAuthenticator.manage_groups = True
c.MemberLDAPAuthenticator.group_search_base = "ou=groups,dc=lab,dc=example"
c.MemberLDAPAuthenticator.group_search_filter = "(member={userdn})"

# Who is a member. Or: member_filter = "(&(objectClass=person)(!(nsAccountLock=TRUE)))"
c.MemberLDAPAuthenticator.allowed_groups = {"gpu-members"}
c.MemberLDAPAuthenticator.admin_groups = {"gpu-admins"}
c.MemberLDAPAuthenticator.contact = "gpu-admin@lab.example"
