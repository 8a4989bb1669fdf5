"""Sign-in from a course of a learning platform (Moodle, Canvas, Open edX ...), by LTI 1.3.

In jupyterhub_config.py, beside this folder, before ``add_services``::

    load_subconfig("auth/lti.py")

It needs ``pip install "gpuspawner[lti]"``. Register the hub at the platform as an external tool:

    login URL       https://hub.example/hub/lti13/oauth_login
    redirect URL    https://hub.example/hub/lti13/oauth_callback
    launch URL      https://hub.example/hub

and let it share mail addresses and open in a new window: JupyterHub forbids browsers to show its
pages in a frame. https://hub.example/hub/lti13/config is the same for a platform that reads it.
"""

from ltiauthenticator.lti13.auth import LTI13Authenticator

from gpuspawner.auth import MemberMixin

c = get_config()


class MemberLTI13Authenticator(MemberMixin, LTI13Authenticator):
    """Who comes from the platform is who they say; the roster says whether they are members."""

    login_service = "your course"


c.JupyterHub.authenticator_class = MemberLTI13Authenticator

# What the platform shows after the registration.
c.MemberLTI13Authenticator.issuer = "https://moodle.lab.example"
c.MemberLTI13Authenticator.authorize_url = "https://moodle.lab.example/mod/lti/auth.php"
c.MemberLTI13Authenticator.jwks_endpoint = "https://moodle.lab.example/mod/lti/certs.php"
c.MemberLTI13Authenticator.client_id = {"written-by-the-platform"}

# The name at the hub. Those of the roster have to be the same: here, mail addresses.
c.MemberLTI13Authenticator.username_key = "email"

# Everybody on the roster, as long as their course lasts: gpuspawner roster import.
# For everybody whom the platform sends, without a roster: c.Authenticator.allow_all = True
c.MemberMixin.roster = True
c.MemberMixin.contact = "gpu-admin@lab.example"
