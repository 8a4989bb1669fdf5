"""The Hub's frame around the service's pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.web.frame import OUR_TEMPLATES, Frame, Place, TemplateUser, passed_on

HERE = Place("/hub/", "/services/gpu/")
PLAIN = Frame()
"""Without an admin's templates; each frame compiles its own."""
EXTENDS = '{% extends "templates/page.html" %}'


def page(frame: Frame, content: str = "<main>mine</main>", **values: Any) -> tuple[str, str]:
    values = {"title": "Billing", "here": "billing", "user": "ada", **values}
    return frame.page(HERE, content=content, **values)


def templates(tmp_path: Path, **texts: str) -> list[str]:
    """The folders of an admin who has these templates, as add_services leaves them."""
    for name, text in texts.items():
        (tmp_path / f"{name}.html").write_text(text)
    return [str(tmp_path), str(OUR_TEMPLATES)]


def test_page_has_the_hubs_navigation_and_marks_where_it_is() -> None:
    html, _ = page(PLAIN)
    title = re.search(r"<title>(.*?)</title>", html, re.DOTALL)
    assert title and title[1].split() == ["Billing", "·", "JupyterHub"]
    assert re.findall(r'<a [^>]*aria-current="page">(\w+)</a>', html) == ["Billing"]
    assert 'href="/hub/home"' in html and 'href="/hub/logout"' in html
    assert "<main>mine</main>" in html and html.count("<main") == 1


def test_runs_are_offered_only_by_a_hub_that_has_them() -> None:
    item = 'href="/services/gpu/runs"'
    without = Frame(PLAIN.template_paths, {"gpuspawner_has_runs": False})
    assert item in page(PLAIN)[0] and item not in page(without)[0]
    html, _ = page(without, here="runs")
    assert re.findall(r'<a [^>]*aria-current="page">(\w+)</a>', html) == ["Runs"]


def test_only_admins_have_the_admin_menu() -> None:
    assert "Audit log" not in page(PLAIN)[0]
    assert "Audit log" in page(PLAIN, admin=True)[0]


def test_page_of_nobody_offers_to_sign_in() -> None:
    html, _ = page(PLAIN, user="")
    assert 'href="/hub/login"' in html and "logout" not in html


def test_admins_templates_and_variables_apply(tmp_path: Path) -> None:
    mine = (
        '{% extends "templates/page.html" %}{% block announcement %}<b>{{ word }}</b>{% endblock %}'
    )
    frame = Frame(templates(tmp_path, page=mine), {"word": "Closed on <Monday>"})
    html, _ = page(Frame.from_text(frame.to_text()))
    assert "<b>Closed on &lt;Monday&gt;</b>" in html and "<main>mine</main>" in html
    assert "Audit log" not in html, "the admin's navigation is JupyterHub's own"


@pytest.mark.parametrize(
    "broken", ["{% extends", EXTENDS + "{% block logo %}{{ nothing.of.it }}{% endblock %}"]
)
def test_broken_template_of_the_admin_is_logged_and_left_out(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    html, _ = page(Frame(templates(tmp_path, page=broken)))
    assert "<main>mine</main>" in html and 'href="/hub/home"' in html
    assert "template_paths cannot be used for the service's pages: " in caplog.text


def test_variables_that_only_the_hub_can_compute_are_left_out() -> None:
    given = {"announcement": "Hello", "announcement_home": lambda user: user.name}
    assert passed_on(["/srv/templates"], given) == Frame(
        ("/srv/templates",), {"announcement": "Hello"}
    )


def test_only_the_templates_scripts_have_the_policys_nonce(tmp_path: Path) -> None:
    mine = f"""{EXTENDS}{{% block footer %}}<script>one</script><style>two</style>
    <script src="https://cdn.example/x.js"></script>{{% endblock %}}"""
    content = "<main><script>evil()</script><link href=x></main>"
    html, policy = page(Frame(templates(tmp_path, page=mine)), content)
    found = re.search(r"script-src 'self' 'nonce-([\w-]{20,})'", policy)
    assert found and "'unsafe-inline'" not in policy.replace("style-src-attr 'unsafe-inline'", "")
    marked = f'nonce="{found[1]}"'
    assert content in html, "whatever got into the content has no nonce"
    for tag in re.findall(r"<(?:script|style|link)\b[^>]*>", html.replace(content, "")):
        assert marked in tag
    for tag in ("script>one", 'script src="https://cdn.example', "style>two"):
        assert f"<{tag.partition('>')[0].partition(' ')[0]} {marked}" in html
    assert page(PLAIN)[1] != policy, "a new one for each page"


def test_policy_names_the_hub_where_the_service_has_a_domain_of_its_own() -> None:
    place = Place("https://hub.example/hub/", "/services/gpu/", "https://hub.example")
    html, policy = PLAIN.page(place, title="T", here="", content="")
    assert "script-src 'self' https://hub.example 'nonce-" in policy
    assert 'src="https://hub.example/hub/static/js/darkmode.js"' in html


@pytest.mark.parametrize("name", ['a"; alert(1)//', "</script><script>alert(1)", "ä\u2028\\"])
def test_members_name_stays_a_string_in_the_frames_script(name: str) -> None:
    html, _ = page(PLAIN, user=name)
    escaped = TemplateUser(name).json_escaped_name
    assert f'user: "{escaped}"' in html and "<" not in escaped and "\u2028" not in escaped
    assert not re.search(r'(?<!\\)(?:\\\\)*"', escaped)
    assert "<script>alert" not in html
