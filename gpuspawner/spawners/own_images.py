"""A member's own image in the place of the environment's, where their group allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment as Templates
from jinja2 import PackageLoader
from traitlets import Dict

from ..catalog import Environment
from ..catalog.own import OwnImages, check_contents, check_own_image, own_images
from ..engines.images import LocalImage, local, offered, remove
from ..errors import GPUSpawnerError, NotAllowed
from ..model import Request
from .files import GPUDockerFiles

_templates = Templates(
    loader=PackageLoader("gpuspawner.spawners"), autoescape=True, trim_blocks=True
)


class GPUDockerOwnImages(GPUDockerFiles):
    """The part of :class:`~gpuspawner.spawners.docker.GPUDockerSpawner` for members' images."""

    if TYPE_CHECKING:
        connect: Any
        remove: bool

    own_images = Dict(
        config=True,
        help="""
        Which groups may bring an image of their own, and which images; ``"*"`` is everybody.

        ``images`` are patterns (``*`` is anything but a slash, ``**`` slashes too), ``most`` is
        the size on the disk, ``labels`` are those that a scanner of yours gives. Containers have
        to go when they stop (``c.DockerSpawner.remove = True``). Example::

            c.GPUDockerSpawner.own_images = {
                "research": {"images": ["lab/**"], "most": "20G", "labels": {"scanned": "yes"}},
            }
        """,
    )

    @property
    def own_image(self) -> str:
        """The image of the member's own that this start asks for; empty for none."""
        return self.parse_options(self.user_options or {}).own_image or ""

    def resolve_options(self) -> tuple[Environment, Request]:
        """Also whether the member may bring the image. Raises NotAllowed."""
        resolved = super().resolve_options()
        if own := self.own_image:
            check_own_image(own, self._own_rules())
        return resolved

    def looks_first(self, request: Request) -> bool:
        """An image of the member's own is looked for before anything is leased for it."""
        return bool(self.own_image) or super().looks_first(request)

    async def look_at_files(self, request: Request) -> None:
        """Also whether its registry has the member's own image. Raises ImageUnavailable."""
        await super().look_at_files(request)
        if own := self.own_image:
            await self.broker.run_outside(self._look_for, own)

    def _own_rules(self) -> list[OwnImages]:
        """None where containers are kept: what is kept belongs to the environment's image."""
        return own_images(self.own_images, self.group_names) if self.remove else []

    def _look_for(self, reference: str) -> None:
        """Blocks. One that is here already is judged at once, before any lease."""
        client = self.connect()
        found = local(client, reference)
        if found is None:
            offered(client, reference)
        else:
            self._judge(reference, found)

    def _judge(self, reference: str, found: LocalImage) -> None:
        rules = check_own_image(reference, self._own_rules())
        check_contents(reference, found.size, found.labels, rules)

    async def check_own_image_here(self) -> None:
        """After the pull: size and labels; what may not be used does not stay. Raises
        NotAllowed."""
        if own := self.own_image:
            await self.broker.run_outside(self._judge_here, own)

    def _judge_here(self, reference: str) -> None:
        client = self.connect()
        found = local(client, reference)
        if found is None:
            return  # the creation of the container says so
        try:
            self._judge(reference, found)
        except NotAllowed:
            remove(client, found)
            raise

    async def get_options_form(self) -> str:
        """The form, with a field for an own image where the member's groups have one."""
        form: str = await super().get_options_form()
        try:
            rules = self._own_rules()
        except GPUSpawnerError as error:
            self.log.error("%s", error.message)
            return form
        if not rules:
            return form
        patterns = sorted({some for rule in rules for some in rule.images})
        last = self.last_choice().own_image or ""
        return form + _templates.get_template("own_image.html").render(patterns=patterns, last=last)
