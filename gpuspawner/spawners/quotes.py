"""What a run would cost and when it would start, by the figures of the start form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..catalog.models import Environment, SessionHours
from ..core.errors import Refused
from ..devices.models import model_matches
from ..hub_pages.prices import FREE, Offer, PriceList, share_choice
from ..leases.models import SHARE, Request, ServerRef, Sharing, Terms
from ..queue.models import Estimate
from ..queue.positions import Outlook
from ..services import Services
from .form import price_list


@dataclass(frozen=True, slots=True, kw_only=True)
class QuoteQuestion:
    """A run that is not submitted yet, and its member's limits."""

    server: ServerRef
    environment: Environment
    request: Request
    terms: Terms
    engine: str
    hours: SessionHours
    most_gpus: int


@dataclass(frozen=True, slots=True)
class QuotedAccount:
    """An account that may pay."""

    account: str
    available: int
    """Microcredits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuote:
    """The answer, as the REST API names its fields."""

    options: Mapping[str, Any]
    environment: str
    environment_name: str
    gpus: int
    most_gpus: int
    share: str
    cpu_variant: bool
    models: tuple[str, ...]
    hours: float | None
    most_hours: float | None
    account: str
    accounts: tuple[QuotedAccount, ...]
    what: str
    price: str
    total: str
    lasts: str
    refusal: str
    preemptible: bool
    preemptible_share: float | None
    at_once: bool
    place: int | None
    estimate: Estimate | None
    planned: datetime | None
    latest: datetime | None


def quote_of(services: Services, asked: QuoteQuestion) -> RunQuote:
    """Return the quote. Blocks on the store. Raises NotAllowed for an account that cannot pay."""
    environment, request, terms = asked.environment, asked.request, asked.terms
    user, groups = asked.server.user, terms.groups
    free = not request.devices
    account = services.ledger.payer(user, groups, terms.account, free=free)
    payers = services.ledger.payers(user, groups)
    now, preemptible = services.clock(), terms.preemptible
    overview = services.monitoring.overview().usable_by(groups, now, preemptible=preemptible)
    offered = PriceList(overview, [environment], now)
    models = offered.model_names(environment)
    hours = None if terms.seconds is None else terms.seconds / 3600
    offer = Offer(price=FREE if free else "")
    suitable = [m for m in models if request.model is None or model_matches(request.model, m)]
    if suitable and not free:
        narrow = environment.model_copy(
            update={"models": tuple(suitable), "min_memory": request.memory_bytes}
        )
        discounted = [services.prices.preemptible] if terms.preemptible else []
        prices = price_list(services, overview, [narrow], payers, groups, *discounted)
        paying = [("", each) for each in payers.accounts if each.name == account]
        count = SHARE if request.sharing is Sharing.SLOT else request.devices
        tables = prices.tables([count], paying, [] if hours is None else [("", hours)])
        offer = tables.find(narrow, f"{count}|") or offer
    lasting, lasts = offer.lasts.get("", (None, ""))
    outlook = _outlook(services, asked)
    has_share = services.delegation.delegate is None
    return RunQuote(
        options={**terms.options, "shown_at": offered.now.isoformat()},
        environment=environment.slug,
        environment_name=environment.display_name,
        gpus=request.devices,
        most_gpus=min(asked.most_gpus, offered.most_gpus(environment)),
        share=share_choice(offered.shares_of(environment)) if asked.most_gpus else "",
        cpu_variant=environment.cpu_variant,
        models=tuple(models),
        hours=hours,
        most_hours=asked.hours.max,
        account=account,
        accounts=tuple(QuotedAccount(each.name, each.available) for each in payers.accounts),
        what=offer.what,
        price=offer.price,
        total=offer.totals.get("", ""),
        lasts=lasts if lasting is not None and (hours is None or lasting < hours) else "",
        refusal=_refusal(services, asked),
        preemptible=terms.preemptible,
        preemptible_share=services.prices.settings.preemptible_share if has_share else None,
        at_once=outlook.at_once,
        place=outlook.place or None,
        estimate=outlook.estimate,
        planned=outlook.planned,
        latest=outlook.latest,
    )


def _outlook(services: Services, asked: QuoteQuestion) -> Outlook:
    """Return how the run would fare. A preemptible one waits beside the queue, for an idle GPU."""
    request, terms, user = asked.request, asked.terms, asked.server.user
    if terms.preemptible:
        spare = services.queue.has_spare(request, user, terms.groups)
        return Outlook(0, 0, at_once=spare)
    ask = services.positions.outlooks
    return ask({"": request}, member=user, groups=terms.groups, seconds=terms.seconds)[""]


def _refusal(services: Services, asked: QuoteQuestion) -> str:
    try:
        services.queue.require_possible(
            asked.server, asked.request, engine=asked.engine, terms=asked.terms
        )
    except Refused as error:
        return error.message
    return ""
